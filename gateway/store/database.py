"""The SQLite database of the store: tables, versions, connection, transactions and errors.

When the block of a change ends, the change is on the disk (WAL, synchronous=FULL) and in the
database file itself. SQLite takes a damaged record for the end of its journal, so changes that only
the journal has could be lost silently.

SQLite does not notice changed bytes inside a text. So each row has a seal, a checksum of its
values, which is checked when the database is opened and by `look`.

A mirror (mirror.py) gets each change after the file, and replaces a damaged file.
"""

from __future__ import annotations

import errno
import re
import shutil
import sqlite3
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from gateway.disk_fault import ROOM_BYTES, unwritten
from gateway.errors import StoreError
from gateway.logging import Logger
from gateway.store import database_files
from gateway.store.mirror import DAMAGED, UNDAMAGED, Mirror
from gateway.store.recorded_connection import RecordedConnection, Statement, transaction
from gateway.store.seals import SEALED, broken_seal, seal_changes

log = Logger("fitserve.store")

VERSION = 16
_SCHEMA = """
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
_KEYS = """
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
_ASLEEP = "ALTER TABLE attempts ADD COLUMN asleep TEXT"
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
# For the tables that are older than seals.
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
# The upgrade of each older version to the next.
_UPGRADES = {
    1: "ALTER TABLE models ADD COLUMN forgiven_at REAL NOT NULL DEFAULT 0",
    2: _KEYS,
    3: _SEALS,
    4: _BENCHES,
    5: _COMMITS,
    6: _ABILITIES,
    7: _CHANGES,
    8: _RESIDENCE,
    9: _EVENTS,
    10: _USAGE,
    11: _ASLEEP,
    12: _CLAIMS,
    13: _PHASES,
    14: _STARTS,
    15: _ESTIMATES,
}
_WORD = re.compile(r"[a-z_]+")
# The statements after the schema for a new database.
_ADDITIONS = (
    _SEALS,
    _BENCHES,
    _ABILITIES,
    _CHANGES,
    _RESIDENCE,
    _EVENTS,
    _USAGE,
    _ASLEEP,
    _PHASES,
    _STARTS,
    _ESTIMATES,
)


def foreign_part(path: Path) -> str | None:
    """A view, trigger, index or table of a database file that no fitserve makes, in words.

    SQLite would run its expressions at each change. None: there is none, or no database at all.
    """
    with (
        closing(sqlite3.connect(":memory:", isolation_level=None)) as empty,
        closing(database_files.reader(path)) as file,
    ):
        Database(path, empty)
        query = "SELECT type, name, coalesce(sql, '') FROM sqlite_master"
        known_parts = {(kind, name): sql for kind, name, sql in empty.execute(query)}
        words = {word for sql in known_parts.values() for word in _WORD.findall(sql.lower())}
        try:
            parts = file.execute(query).fetchall()
        except sqlite3.Error:
            return None
    for kind, name, sql in parts:
        if (kind, name) not in known_parts or not words.issuperset(_WORD.findall(sql.lower())):
            return f"the {kind} {name[:100]!r} is not one of fitserve"
    return None


class OtherVersion(StoreError):
    """Another version of fitserve wrote the database."""


class Damaged(StoreError):
    """The content of the file has changed outside of SQLite."""

    problem = ""


class Database:
    """A connection behind a lock. Raises StoreError if it cannot open, read or write.

    copy: a connection to use instead of the file, which is then neither read nor written.
    mirrored: keep a mirror beside the file.
    """

    def __init__(
        self, path: Path, copy: sqlite3.Connection | None = None, *, mirrored: bool = True
    ) -> None:
        self.path = path
        self._write_error: str | None = None
        """Of the last change, if it could not be written."""
        self._lock = threading.Lock()
        self._mirror: Mirror | None = None
        if copy is not None:
            self.connection = copy
            with self._translated("opened"):
                self._prepare()
            return
        self._connect()
        if mirrored:
            self._mirror = Mirror(path)

    @property
    def failing(self) -> str | None:
        """The damage of the file, or the error of the last change."""
        return (self._mirror and self._mirror.damage) or self._write_error

    def rows(self, sql: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with self._translated("read"), self._lock:
            mirror = self._mirror.connection if self._mirror and self._mirror.damage else None
            return (mirror or self.connection).execute(sql, values).fetchall()

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """A transaction: the changes of the block are written as a whole; none if it raises."""
        with self._translated("written"), self._lock:
            if self._mirror is not None:
                self._mirror.refuse_damage(self.connection)
            with transaction(self.connection) as db, self._noted() as statements:
                yield db
            if self._mirror is not None:
                self._mirror.add(statements, self.connection)

    def look(self) -> None:
        """Inspect the file, and put the last good state back once a damaged file rests.

        Call it every few seconds: it does little while nothing changes.
        """
        if self._mirror is None:
            return
        with suppress(StoreError), self._translated("read"), self._lock:
            if (
                self._mirror.look(self.connection)
                and (content := self._mirror.content()) is not None
            ):
                self.connection.close()
                damaged_path = database_files.put_back(content, self.path)
                self._connect()
                self._write_error = None
                self._mirror.note_repair(damaged_path)

    def check(self) -> None:
        """Test by an empty change whether writing works again. Raises StoreError."""
        with self.change() as db:
            # The journal can have free space inside, so this write alone proves nothing for the
            # next change.
            if shutil.disk_usage(self.path.parent).free < ROOM_BYTES:
                raise OSError(errno.ENOSPC, "the disk is still full")
            db.execute("UPDATE meta SET value=value WHERE key='instance'")

    def close(self) -> None:
        with self._lock:
            self.connection.close()
            if self._mirror is not None:
                self._mirror.close()

    def _connect(self) -> None:
        with self._translated("opened"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            database_files.make_private(self.path)
            self.connection = sqlite3.connect(
                self.path,
                isolation_level=None,
                check_same_thread=False,
                timeout=10,
                factory=RecordedConnection,
            )
            try:
                self._open()
            except BaseException:
                self.connection.close()
                raise

    @contextmanager
    def _noted(self) -> Iterator[list[Statement]]:
        """The statements of the block, for the mirror."""
        statements: list[Statement] = []
        if isinstance(self.connection, RecordedConnection) and self._mirror is not None:
            self.connection.statements = statements
        try:
            yield statements
        finally:
            if isinstance(self.connection, RecordedConnection):
                self.connection.statements = None

    def _open(self) -> None:
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("PRAGMA synchronous=FULL")
        self.connection.execute("PRAGMA wal_autocheckpoint=1")
        self._prepare()
        with transaction(self.connection) as db:
            # SQLite opens a read-only file without an error and refuses the first change.
            db.execute("UPDATE meta SET value=value WHERE key='instance'")

    def _prepare(self) -> None:
        """Make the tables, or upgrade sound ones. Raises Damaged, OtherVersion."""
        version: int = self.connection.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, *_UPGRADES, VERSION):
            raise OtherVersion(
                f"The database {self.path} has version {version}, and this fitserve reads version"
                f" {VERSION}.",
                hint="Use the fitserve version that wrote it, or another FITSERVE_DATA_DIR.",
            )
        if (
            version
            and (problem := self.connection.execute("PRAGMA integrity_check(1)").fetchone()[0])
            != "ok"
        ):
            raise self._damaged(problem)
        if version == 0:
            with transaction(self.connection) as db:
                self._execute(_SCHEMA + _KEYS + ";".join(_ADDITIONS))
                db.execute("INSERT INTO meta VALUES ('instance', ?)", (uuid.uuid4().hex[:12],))
                db.execute(f"PRAGMA user_version={VERSION}")
        for older in range(version or VERSION, VERSION):
            with transaction(self.connection) as db:
                self._execute(_UPGRADES[older])
                db.execute(f"PRAGMA user_version={older + 1}")
        seal_changes(self.connection)
        if 0 < version < VERSION:
            self._seal_all()
        if (problem := broken_seal(self.connection)) is not None:
            raise self._damaged(problem)
        if self.connection.execute("SELECT 1 FROM meta WHERE key='instance'").fetchone() is None:
            raise self._damaged("it does not name its installation")

    def _seal_all(self) -> None:
        with transaction(self.connection) as db:
            for table, columns in SEALED.items():
                db.execute(f"UPDATE {table} SET seal=seal_of({columns})")  # noqa: S608

    def _execute(self, statements: str) -> None:
        for statement in statements.split(";"):
            self.connection.execute(statement)

    def _damaged(self, problem: str) -> Damaged:
        damaged = Damaged(
            f"The database {self.path} is damaged: {problem}.",
            hint="Move the file away to start with an empty database.",
        )
        damaged.problem = problem
        return damaged

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        try:
            yield
            if doing == "written":
                self._write_error = None
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            # The text of an error can contain bytes of a damaged file.
            code = (
                sqlite3.SQLITE_CORRUPT
                if isinstance(error, UnicodeDecodeError)
                else getattr(error, "sqlite_errorcode", None)
            )
            if doing == "opened" and code is not None and code & 0xFF not in UNDAMAGED:
                raise self._damaged(str(error)) from None
            if (
                doing != "opened"
                and self._mirror is not None
                and self._mirror.damage is None
                and code is not None
                and code & 0xFF in DAMAGED
            ):
                self._mirror.note_damage(str(error))
            if doing == "written":
                self._write_error = str(error)
            # The text of an error of SQLite can contain bytes of a damaged file.
            thing = f"The database {self.path} could not be {doing}"
            if isinstance(error, UnicodeDecodeError):
                raise StoreError(
                    f"{thing}: {error}. Nothing was changed.", hint="Restore a backup."
                ) from None
            raise unwritten(thing, self.path.parent, error) from None
