"""The SQLite database of the store: tables, versions, connection, transactions and errors.

When the block of a change ends, the change is on the disk (WAL, synchronous=FULL) and in the
database file itself. SQLite takes a damaged record for the end of its journal, so changes that only
the journal has could be lost silently.

SQLite does not notice changed bytes inside a text. So each row has a seal, a checksum of its
values, which is checked when the database is opened and by `look`.

A mirror, a second file beside the database, gets each change after it. SQLite keeps pages in memory
and would go on over a file that others have changed, so `look` and each change compare the file
with what was written. A damaged file is set aside, and the mirror takes its place.
"""

from __future__ import annotations

import errno
import shutil
import sqlite3
import threading
import time
import uuid
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from gateway.errors import StoreError
from gateway.logging import Logger
from gateway.store import database_files
from gateway.store.recorded_connection import RecordedConnection, Statement

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
    15: _ESTIMATES,
}
# With fewer free bytes the next change would fail again.
_ROOM_BYTES = 1024 * 1024
# Seconds between two checks of a whole file that has changed, and their largest part of a core.
_INSPECTION_S = 5.0
_INSPECTION_SHARE = 0.01
# A damaged file is replaced once nobody has written to it for so long.
_REST_S = 10.0
# Changes that a mirror may lack before it is made anew.
_MOST_PENDING = 1000
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
# Primary result codes of a file that is no sound database any more.
_DAMAGED = frozenset((sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB))


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
        self.failing: str | None = None
        """The error of the last change, if it could not be written."""
        self._lock = threading.Lock()
        self._mirror: sqlite3.Connection | None = None
        """Made with the first change or look, because its writing takes time."""
        self._pending: list[list[Statement]] = []
        """Changes that the mirror lacks."""
        self._stamp: database_files.Stamp | None = None
        """The state of the file after the last change; None: there is no file to compare."""
        self._damage: str | None = None
        self._damaged_at = self._inspected_at = self._inspection_s = 0.0
        self._changed = False
        """Whether the file has changed since the last inspection."""
        if copy is not None:
            self.connection = copy
            with self._translated("opened"):
                self._prepare()
            return
        self._connect()
        if mirrored:
            self._stamp = database_files.stamp(path)

    def rows(self, sql: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with self._translated("read"), self._lock:
            good = self._mirror if self._damage is not None else None
            return (good or self.connection).execute(sql, values).fetchall()

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """A transaction: the changes of the block are written as a whole; none if it raises."""
        with self._translated("written"), self._lock:
            self._refuse_damage()
            with _transaction(self.connection) as db, self._noted() as statements:
                yield db
            if self._stamp is not None:
                self._stamp, self._changed = database_files.stamp(self.path), True
                self._pending.append(statements)
                self._repeat()

    def look(self) -> None:
        """Inspect the file, and put the last good state back once a damaged file rests.

        Call it every few seconds: it does little while nothing changes.
        """
        if self._stamp is None:
            return
        with suppress(StoreError), self._translated("read"), self._lock:
            now = time.monotonic()
            stamp = database_files.stamp(self.path)
            if self._mirror is None and self._damage is None:
                self._make_mirror()
            if self._damage is None:
                rest_s = max(_INSPECTION_S, self._inspection_s / _INSPECTION_SHARE)
                if stamp != self._stamp or (self._changed and now > self._inspected_at + rest_s):
                    self._inspect()
            elif stamp != self._stamp:
                self._stamp, self._damaged_at = stamp, now
            elif now > self._damaged_at + _REST_S:
                self._put_back()

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
            if self._mirror is not None:
                self._mirror.close()

    # --- the file and its mirror ---

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
        if isinstance(self.connection, RecordedConnection) and self._stamp is not None:
            self.connection.statements = statements
        try:
            yield statements
        finally:
            if isinstance(self.connection, RecordedConnection):
                self.connection.statements = None

    def _repeat(self) -> None:
        """Give the mirror the changes that it lacks. The changes are on the disk already."""
        if self._mirror is None or len(self._pending) > _MOST_PENDING:
            self._make_mirror()
            return
        try:
            self._write_pending(self._mirror)
        except sqlite3.Error as error:
            log.warning("the mirror of the database could not be written", error=str(error))

    def _write_pending(self, mirror: sqlite3.Connection) -> None:
        """Raises sqlite3.Error. Written changes are no longer pending."""
        while self._pending:
            with _transaction(mirror):
                for sql, rows in self._pending[0]:
                    mirror.executemany(sql, rows)
            del self._pending[0]

    def _make_mirror(self) -> None:
        """Copy this sound database into a new mirror. Without room there is none for now."""
        path = database_files.mirror_of(self.path)
        if self._mirror is not None:
            self._mirror.close()
        self._mirror = None
        try:
            database_files.remove(path)
            database_files.write(self.connection, path)
            mirror = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            # Less than the database's FULL: a power cut may damage the mirror. SQLite ends a
            # damaged journal early, so the mirror too has all changes in its file.
            mirror.execute("PRAGMA journal_mode=WAL")
            mirror.execute("PRAGMA synchronous=OFF")
            mirror.execute("PRAGMA wal_autocheckpoint=1")
            _seal_changes(mirror)
        except (sqlite3.Error, OSError) as error:
            log.warning("the database has no mirror", file=str(path), error=str(error))
            return
        self._mirror = mirror
        self._pending.clear()

    def _refuse_damage(self) -> None:
        """Raise StoreError if the file is damaged, or was changed by others to its damage."""
        if (
            self._stamp is not None
            and self._damage is None
            and database_files.stamp(self.path) != self._stamp
        ):
            self._inspect()
        if self._damage is not None:
            raise StoreError(
                f"The database {self.path} was damaged while the gateway ran: {self._damage}."
                " Nothing was changed.",
                hint="Its last good state is put back in some seconds; see the gateway's log.",
            )

    def _inspect(self) -> None:
        """Read the whole file, and note its damage."""
        began = time.monotonic()
        stamp = database_files.stamp(self.path)
        self._changed = False
        problem = database_files.difference(self._stamp, stamp) or self._problem_of_file()
        if problem is None and self._mirror is not None and not self._pending:
            problem = self._compare(self._mirror, is_foreign=stamp != self._stamp)
        self._stamp = stamp
        self._inspected_at = time.monotonic()
        self._inspection_s = self._inspected_at - began
        if problem is not None:
            self._note_damage(problem)

    def _problem_of_file(self) -> str | None:
        """The damage of the file as a new reader sees it, without the pages in memory."""
        try:
            with closing(database_files.reader(self.path)) as file:
                problem = str(file.execute("PRAGMA integrity_check(1)").fetchone()[0])
                file.create_function("seal_of", -1, _seal_of, deterministic=True)
                return problem if problem != "ok" else _broken_seal(file)
        except sqlite3.Error as error:
            code = error.sqlite_errorcode & 0xFF
            return str(error) if code not in _UNDAMAGED else None
        except UnicodeDecodeError as error:
            return str(error)

    def _compare(self, mirror: sqlite3.Connection, *, is_foreign: bool) -> str | None:
        """The problem of a sound file whose rows are not those of its mirror.

        is_foreign: others have written to the file. Without that the mirror is wrong, and is made
        anew.
        """
        try:
            with closing(database_files.reader(self.path)) as file:
                if _sums(file) == _sums(mirror):
                    return None
            is_sound = _broken_seal(mirror) is None
        except (sqlite3.Error, UnicodeDecodeError):
            is_sound = False
        if is_sound and is_foreign:
            return "it has other rows than the gateway wrote"
        self._make_mirror()
        return None

    def _note_damage(self, problem: str) -> None:
        self._damage = self.failing = problem
        self._damaged_at = time.monotonic()
        log.error(
            "the database was damaged while open; changes are refused until its last good state"
            " is put back",
            file=str(self.path),
            problem=problem,
        )

    def _put_back(self) -> None:
        """Set the damaged file aside and continue with the content of the mirror."""
        self._damaged_at = time.monotonic()
        if self._mirror is None:
            return
        self._write_pending(self._mirror)
        if (problem := _broken_seal(self._mirror)) is not None:
            log.error("the mirror of the database is damaged too", problem=problem)
            return
        self.connection.close()
        aside = database_files.put_back(self._mirror, self.path)
        self._connect()
        self._stamp = database_files.stamp(self.path)
        self._damage = self.failing = None
        log.error(
            "the last good state of the database was put back",
            file=str(self.path),
            damaged=str(aside),
        )

    def _open(self) -> None:
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("PRAGMA synchronous=FULL")
        self.connection.execute("PRAGMA wal_autocheckpoint=1")
        self._prepare()
        with _transaction(self.connection) as db:
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
            with _transaction(self.connection) as db:
                self._execute(_SCHEMA + _KEYS + ";".join(_ADDITIONS))
                db.execute("INSERT INTO meta VALUES ('instance', ?)", (uuid.uuid4().hex[:12],))
                db.execute(f"PRAGMA user_version={VERSION}")
        for older in range(version or VERSION, VERSION):
            with _transaction(self.connection) as db:
                self._execute(_UPGRADES[older])
                db.execute(f"PRAGMA user_version={older + 1}")
        _seal_changes(self.connection)
        if 0 < version < VERSION:
            self._seal_all()
        if (problem := _broken_seal(self.connection)) is not None:
            raise self._damaged(problem)
        if self.connection.execute("SELECT 1 FROM meta WHERE key='instance'").fetchone() is None:
            raise self._damaged("it does not name its installation")

    def _seal_all(self) -> None:
        with _transaction(self.connection) as db:
            for table, columns in _SEALED.items():
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
            if (
                doing != "opened"
                and self._stamp is not None
                and self._damage is None
                and code is not None
                and code & 0xFF in _DAMAGED
            ):
                self._note_damage(str(error))
            if doing == "written":
                self.failing = str(error)
            raise StoreError(
                f"The database {self.path} could not be {doing}: {error}. Nothing was changed.",
                hint=(
                    "Free disk space or repair the permissions of FITSERVE_DATA_DIR, then try"
                    " again."
                ),
            ) from None


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    try:
        connection.execute("COMMIT")
    except sqlite3.Error:
        # A full disk refuses the commit and leaves the transaction open. The next change must not
        # join it.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _seal_changes(connection: sqlite3.Connection) -> None:
    """Have the connection seal each row that it adds or changes."""
    connection.create_function("seal_of", -1, _seal_of, deterministic=True)
    for table, columns in _SEALED.items():
        new = f"seal_of(new.{columns.replace(', ', ', new.')})"
        sealed = f"UPDATE {table} SET seal={new} WHERE rowid=new.rowid"  # noqa: S608
        for name, event in (("added", "INSERT"), ("changed", f"UPDATE OF {columns}")):
            connection.execute(
                f"CREATE TEMP TRIGGER {table}_{name} AFTER {event} ON {table} BEGIN {sealed}; END"
            )


def _broken_seal(connection: sqlite3.Connection) -> str | None:
    """The table with a row that is not as it was written, in words; None: there is none."""
    for table, columns in _SEALED.items():
        query = f"SELECT 1 FROM {table} WHERE seal IS NOT seal_of({columns}) LIMIT 1"  # noqa: S608
        if connection.execute(query).fetchone():
            return f"a row of {table} is not as it was written"
    return None


def _sums(connection: sqlite3.Connection) -> list[tuple[int, float]]:
    """Number and sum of the seals of each table, which two equal databases share."""
    query = "SELECT count(*), total(seal) FROM"
    return [connection.execute(f"{query} {table}").fetchone() for table in _SEALED]


def _seal_of(*values: object) -> int:
    return zlib.crc32(repr(values).encode())
