"""The SQLite database of the store: tables, versions, connection, transactions and errors.

When the block of a change ends, the change is on the disk (WAL, synchronous=FULL) and in the
database file itself. SQLite takes a damaged record for the end of its journal, so changes that only
the journal has could be lost silently.

SQLite does not notice changed bytes inside a text. So each row has a seal, a checksum of its
values, which is checked when the database is opened.
"""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import threading
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gateway.errors import StoreError

VERSION = 15
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
_SEALED = {
    "models": "name, wish, created_at, deleting, forgiven_at, generation, change, stopped, used_at",
    "attempts": (
        "id, model, replica, state, plan, fingerprint, port, started_at, ready_at, ended_at,"
        " failure, abilities, generation, asleep, phases"
    ),
    "facts": "id, fact, attempt, learned_at",
    "keys": "name, digest, may, created_at",
    "benches": "id, model, at, bench",
}
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
}
# With fewer free bytes the next change would fail again.
_ROOM_BYTES = 1024 * 1024
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
)
# Primary result codes that do not mean damage to the file.
_UNDAMAGED = frozenset(
    (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_READONLY,
    )
)


class OtherVersion(StoreError):
    """Another version of fitserve wrote the database."""


class Damaged(StoreError):
    """The content of the file has changed outside of SQLite."""

    problem = ""


class Database:
    """A connection behind a lock. Raises StoreError if it cannot open, read or write.

    copy: a connection to use instead of the file, which is then neither read nor written.
    """

    def __init__(self, path: Path, copy: sqlite3.Connection | None = None) -> None:
        self.path = path
        self.failing: str | None = None
        """The error of the last change, if it could not be written."""
        self._lock = threading.Lock()
        if copy is not None:
            self.connection = copy
            with self._translated("opened"):
                self._prepare()
            return
        with self._translated("opened"):
            path.parent.mkdir(parents=True, exist_ok=True)
            existed = path.exists()
            if not existed:
                # SQLite gives its other files the mode of the database.
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self.connection = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=10
            )
            try:
                self._open()
            except BaseException:
                self.connection.close()
                raise

    def rows(self, sql: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with self._translated("read"), self._lock:
            return self.connection.execute(sql, values).fetchall()

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """A transaction: the changes of the block are written as a whole; none if it raises."""
        with self._translated("written"), self._lock, self._transaction() as db:
            yield db

    def check(self) -> None:
        """Test by an empty change whether writing works again. Raises StoreError."""
        with self.change() as db:
            # The journal can have free space inside, so this write alone proves nothing for the
            # next change.
            if shutil.disk_usage(self.path.parent).free < _ROOM_BYTES:
                raise OSError(errno.ENOSPC, "the disk is still full")
            db.execute("UPDATE meta SET value=value WHERE key='instance'")

    def close(self) -> None:
        with self._lock:
            self.connection.close()

    def _open(self) -> None:
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("PRAGMA synchronous=FULL")
        self.connection.execute("PRAGMA wal_autocheckpoint=1")
        self._prepare()
        with self._transaction() as db:
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
        self.connection.create_function("seal_of", -1, _seal_of, deterministic=True)
        if version == 0:
            with self._transaction() as db:
                self._execute(_SCHEMA + _KEYS + ";".join(_ADDITIONS))
                db.execute("INSERT INTO meta VALUES ('instance', ?)", (uuid.uuid4().hex[:12],))
                db.execute(f"PRAGMA user_version={VERSION}")
        for older in range(version or VERSION, VERSION):
            with self._transaction() as db:
                self._execute(_UPGRADES[older])
                db.execute(f"PRAGMA user_version={older + 1}")
        self._check_seals(upgraded=0 < version < VERSION)
        if self.connection.execute("SELECT 1 FROM meta WHERE key='instance'").fetchone() is None:
            raise self._damaged("it does not name its installation")

    def _check_seals(self, *, upgraded: bool) -> None:
        """Check the seals of all rows, or set them after an upgrade, and seal later changes."""
        for table, columns in _SEALED.items():
            seal = f"seal_of({columns})"
            if upgraded:
                with self._transaction() as db:
                    db.execute(f"UPDATE {table} SET seal={seal}")  # noqa: S608 - names of this file
            if self.connection.execute(
                f"SELECT 1 FROM {table} WHERE seal IS NOT {seal} LIMIT 1"  # noqa: S608
            ).fetchone():
                raise self._damaged(f"a row of {table} is not as it was written")
            new = f"seal_of(new.{columns.replace(', ', ', new.')})"
            for name, event in (("added", "INSERT"), ("changed", f"UPDATE OF {columns}")):
                sealed = f"UPDATE {table} SET seal={new} WHERE rowid=new.rowid"  # noqa: S608
                self.connection.execute(
                    f"CREATE TEMP TRIGGER {table}_{name} AFTER {event} ON {table} BEGIN"
                    f" {sealed}; END"
                )

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
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield self.connection
        except BaseException:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise
        try:
            self.connection.execute("COMMIT")
        except sqlite3.Error:
            # A full disk refuses the commit and leaves the transaction open. The next change must
            # not join it.
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        try:
            yield
            if doing == "written":
                self.failing = None
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            # The text of an error can contain bytes of a damaged file.
            code = (
                sqlite3.SQLITE_CORRUPT
                if isinstance(error, UnicodeDecodeError)
                else getattr(error, "sqlite_errorcode", None)
            )
            if doing == "opened" and code is not None and code & 0xFF not in _UNDAMAGED:
                raise self._damaged(str(error)) from None
            if doing == "written":
                self.failing = str(error)
            raise StoreError(
                f"The database {self.path} could not be {doing}: {error}. Nothing was changed.",
                hint=(
                    "Free disk space or repair the permissions of FITSERVE_DATA_DIR, then try"
                    " again."
                ),
            ) from None


def _seal_of(*values: object) -> int:
    return zlib.crc32(repr(values).encode())
