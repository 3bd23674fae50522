"""The tables of the database, and the upgrade of each older version."""

from __future__ import annotations

VERSION = 18

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE models (
    name TEXT PRIMARY KEY, wish TEXT NOT NULL, created_at REAL NOT NULL,
    deleting INTEGER NOT NULL DEFAULT 0, forgiven_at REAL NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE attempts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, model TEXT NOT NULL, replica INTEGER NOT NULL,
    state TEXT NOT NULL, plan TEXT NOT NULL, fingerprint TEXT NOT NULL, port INTEGER NOT NULL,
    started_at REAL NOT NULL, ready_at REAL, ended_at REAL, failure TEXT
) STRICT;
CREATE INDEX attempts_of ON attempts (model, replica, id);
CREATE TABLE facts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, fact TEXT NOT NULL UNIQUE, attempt INTEGER,
    learned_at REAL NOT NULL
) STRICT;
"""

# digest: SHA-256 of a key in hexadecimal digits. The key itself is stored nowhere.
KEYS = """
CREATE TABLE IF NOT EXISTS keys (
    name TEXT PRIMARY KEY, digest TEXT NOT NULL UNIQUE, may TEXT NOT NULL, created_at REAL NOT NULL
) STRICT;
"""

# bench: a measurement by `fitserve bench`.
_BENCHES = """
CREATE TABLE benches (
    id INTEGER PRIMARY KEY AUTOINCREMENT, model TEXT NOT NULL, at REAL NOT NULL,
    bench TEXT NOT NULL, seal INTEGER
) STRICT;
CREATE INDEX benches_of ON benches (model, id)
"""

# stopped: by its owner. used_at: time of the last request, noted at most once a minute.
_RESIDENCE = (
    "ALTER TABLE models ADD COLUMN stopped INTEGER NOT NULL DEFAULT 0; ALTER TABLE models ADD"
    " COLUMN used_at REAL NOT NULL DEFAULT 0"
)

# Events (store/event_table.py), without a seal: a damaged event must not cost the models.
_EVENTS = """
CREATE TABLE events (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, model TEXT, replica INTEGER,
    attempt INTEGER, words TEXT NOT NULL, data TEXT NOT NULL
) STRICT
"""

# Usage by key and model (store/usage_table.py), without a seal like events.
_USAGE = """
CREATE TABLE usage (
    day INTEGER NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL, requests INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL, untold_requests INTEGER NOT NULL, PRIMARY KEY (day, key, model)
) STRICT, WITHOUT ROWID
"""

# The abilities that the engine has shown.
_ABILITIES = "ALTER TABLE attempts ADD COLUMN abilities TEXT"

# The sleep of an engine: its beginning and the freed memory.
_SLEEP = "ALTER TABLE attempts ADD COLUMN asleep TEXT"

# Seconds of each phase of the start.
_PHASES = "ALTER TABLE attempts ADD COLUMN phases TEXT"

# Starts that succeeded (store/start_table.py), without a seal like events.
_STARTS = """
CREATE TABLE IF NOT EXISTS starts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, start TEXT NOT NULL
) STRICT
"""

# Tokens of requests that engines report none for, estimated from bytes.
_ESTIMATES = "ALTER TABLE usage ADD COLUMN estimated_tokens INTEGER NOT NULL DEFAULT 0"

# Serving models stay as they are: the wish gets the commits of the last ready plan, else of the
# last plan. First of the model, then of its drafter.
_COMMITS = """
UPDATE models SET wish=json_set(wish, '$.commits', json(coalesce((
    SELECT json_object(
        json_extract(wish, '$.source') || coalesce('@' || json_extract(wish, '$.revision'), ''),
        json_extract(plan, '$.model.revision')
    ) FROM attempts WHERE model=models.name
    AND json_extract(plan, '$.model.source')=json_extract(wish, '$.source')
    AND json_extract(plan, '$.model.revision') IS NOT NULL
    ORDER BY ready_at IS NULL, id DESC LIMIT 1
), '{}')));
UPDATE models SET wish=json_set(
    wish, '$.commits', json_patch(json_extract(wish, '$.commits'), coalesce((
    SELECT json_object(json_extract(wish, '$.drafter'), json_extract(plan, '$.drafter.revision'))
    FROM attempts WHERE model=models.name
    AND json_extract(plan, '$.drafter.source')=json_extract(wish, '$.drafter')
    AND json_extract(plan, '$.drafter.revision') IS NOT NULL
    ORDER BY ready_at IS NULL, id DESC LIMIT 1
), '{}')))
"""

# Columns for tables that are older than seals.
_SEALS = ";".join(
    f"ALTER TABLE {table} ADD COLUMN seal INTEGER"
    for table in ("models", "attempts", "facts", "keys")
)

# generation: the number of wishes that a model had. change: a wish that replaces the one in force,
# or was given up.
_CHANGES = (
    "ALTER TABLE models ADD COLUMN generation INTEGER NOT NULL DEFAULT 0;ALTER TABLE models ADD"
    " COLUMN change TEXT;ALTER TABLE attempts ADD COLUMN generation INTEGER NOT NULL DEFAULT 0"
)

# The cap of a model was once in tokens and is now in bytes; the next plan sets it again.
_CLAIMS = (
    "UPDATE attempts SET plan=json_remove(plan, '$.cap') WHERE json_extract(plan, '$.cap.tokens')"
    " IS NOT NULL"
)

# The context of a wish was once a preference, and now bounds plans. A stored wish keeps its plan:
# its context is between its own bounds, of which the lower one is one token where it has none.
_CONTEXTS = ";".join(
    f"UPDATE models SET {column}=json_set({column}, '{at}.context', min(max(json_extract({column},"  # noqa: S608
    f" '{at}.context'), coalesce(json_extract({column}, '{at}.min_context'), 1)),"
    f" coalesce(json_extract({column}, '{at}.max_context'), {2**53})), '{at}.min_context',"
    f" coalesce(json_extract({column}, '{at}.min_context'), 1))"
    f" WHERE json_extract({column}, '{at}.context') IS NOT NULL"
    for column, at in (("wish", "$"), ("change", "$.wish"))
)

# Wishes in force and refused ones (store/wish_table.py). origin: author and time.
_WISHES = """
CREATE TABLE IF NOT EXISTS wishes (
    id INTEGER PRIMARY KEY AUTOINCREMENT, model TEXT NOT NULL, number INTEGER NOT NULL,
    origin TEXT NOT NULL, wish TEXT NOT NULL, refused TEXT NOT NULL DEFAULT '', seal INTEGER
) STRICT;
CREATE INDEX IF NOT EXISTS wishes_of ON wishes (model, number)
"""

# The author of a wish from before the history is unknown, and its time is that of the model.
_FIRST_WISHES = """
INSERT INTO wishes (model, number, origin, wish)
SELECT name, 1, json_object('at', created_at, 'key', '', 'way', 'unknown'), wish FROM models
WHERE name NOT IN (SELECT model FROM wishes);
INSERT INTO wishes (model, number, origin, wish, refused)
SELECT name, 2,
    json_object('at', json_extract(change, '$.at'), 'key', '', 'way', 'unknown'),
    json_extract(change, '$.wish'), json_extract(change, '$.refused')
FROM models WHERE change IS NOT NULL AND (SELECT max(number) FROM wishes WHERE model=name)=1
"""

# The upgrade of each older version to the next.
UPGRADES = {
    1: "ALTER TABLE models ADD COLUMN forgiven_at REAL NOT NULL DEFAULT 0",
    2: KEYS,
    3: _SEALS,
    4: _BENCHES,
    5: _COMMITS,
    6: _ABILITIES,
    7: _CHANGES,
    8: _RESIDENCE,
    9: _EVENTS,
    10: _USAGE,
    11: _SLEEP,
    12: _CLAIMS,
    13: _PHASES,
    14: _STARTS,
    15: _ESTIMATES,
    16: _CONTEXTS,
    17: f"{_WISHES};{_FIRST_WISHES}",
}

# The statements after the schema for a new database.
ADDITIONS = (
    _SEALS,
    _BENCHES,
    _ABILITIES,
    _CHANGES,
    _RESIDENCE,
    _EVENTS,
    _USAGE,
    _SLEEP,
    _PHASES,
    _STARTS,
    _ESTIMATES,
    _WISHES,
)
