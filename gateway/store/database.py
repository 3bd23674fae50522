"""The SQLite database of the store: connection, versions, transactions and errors.

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

from gateway.disk_fault import ROOM_BYTES, disk_fault, unwritten_error
from gateway.errors import StoreError
from gateway.logging import Logger
from gateway.store import database_files
from gateway.store.mirror import DAMAGE_CODES, HARMLESS_CODES, Mirror
from gateway.store.recorded_connection import RecordedConnection, Statement, transaction
from gateway.store.schema import ADDITIONS, KEYS, SCHEMA, UPGRADES, VERSION
from gateway.store.seals import SEALED_COLUMNS, Sums, broken_seal, seal_changes, seal_sums

log = Logger("fitserve.store")

_WORD = re.compile(r"[a-z_]+")


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


class DamagedDatabaseError(StoreError):
    """The content of the file has changed outside of SQLite."""

    problem = ""


class Database:
    """A connection that a lock protects. Raises StoreError if it cannot open, read or write.

    copy: a connection to use instead of the file, which is then neither read nor written.
    is_mirrored: whether a mirror is kept next to the file.
    """

    def __init__(
        self, path: Path, copy: sqlite3.Connection | None = None, *, is_mirrored: bool = True
    ) -> None:
        self.path = path
        self._origin: Sums = []
        """The sums of a copy's seals before any change, which the file still has."""
        self._write_error: str | None = None
        """The error of the last failed change, until a change succeeds and the disk has room."""
        self._lock = threading.Lock()
        self._mirror: Mirror | None = None
        if copy is not None:
            self.connection = copy
            with self._translate_errors("opened"):
                self._prepare()
                self._origin = seal_sums(copy)
            return
        self._connect()
        if is_mirrored:
            self._mirror = Mirror(path)

    @property
    def failing(self) -> str | None:
        """The damage of the file, or the error of a change, until changes have room again."""
        return (self._mirror and self._mirror.damage) or self._write_error

    def rows(self, sql: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with self._translate_errors("read"), self._lock:
            mirror = self._mirror.connection if self._mirror and self._mirror.damage else None
            return (mirror or self.connection).execute(sql, values).fetchall()

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """A transaction: the changes of the block are written as a whole; none if it raises."""
        with self._translate_errors("written"), self._lock:
            if self._mirror is not None:
                self._mirror.refuse_damage(self.connection)
            with transaction(self.connection) as db, self._record_statements() as statements:
                yield db
            if self._mirror is not None:
                self._mirror.add(statements, self.connection)

    def inspect(self) -> None:
        """Inspect the file, and put the last good state back once a damaged file rests.

        Call it every few seconds: it does little while nothing changes.
        """
        if self._mirror is None:
            return
        with suppress(StoreError), self._translate_errors("read"), self._lock:
            if (
                self._mirror.inspect(self.connection)
                and (content := self._mirror.content()) is not None
            ):
                self.connection.close()
                damaged_path = database_files.put_back(content, self.path)
                self._connect()
                self._write_error = None
                self._mirror.record_repair(damaged_path)

    def return_to_file(self) -> bool:
        """Write the copy into its file. Returns whether it is there; the file is in use from then
        on.

        Nothing happens while the file cannot be written, or has other rows than the copy had at
        first: then others have changed it. Not called for a file that was set aside.
        """
        if disk_fault(self.path.parent) is not None:
            return False
        with suppress(StoreError), self._translate_errors("opened"), self._lock:
            copy = self.connection
            is_written = False
            try:
                self._connect()
                if seal_sums(self.connection) == self._origin:
                    copy.backup(self.connection)
                    self._origin = seal_sums(copy)
                    # Only a change moves the backup from the journal into the file.
                    self._touch()
                    is_written = True
            finally:
                if not is_written and self.connection is not copy:
                    self.connection.close()
                    self.connection = copy
            if is_written:
                copy.close()
                self._write_error, self._mirror = None, Mirror(self.path)
            return is_written
        return False

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
        with self._translate_errors("opened"):
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
                self._open_database()
            except BaseException:
                self.connection.close()
                raise

    @contextmanager
    def _record_statements(self) -> Iterator[list[Statement]]:
        """The statements of the block, for the mirror."""
        statements: list[Statement] = []
        if isinstance(self.connection, RecordedConnection) and self._mirror is not None:
            self.connection.statements = statements
        try:
            yield statements
        finally:
            if isinstance(self.connection, RecordedConnection):
                self.connection.statements = None

    def _open_database(self) -> None:
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("PRAGMA synchronous=FULL")
        self.connection.execute("PRAGMA wal_autocheckpoint=1")
        self._prepare()
        # SQLite opens a read-only file without an error and refuses the first change.
        self._touch()

    def _touch(self) -> None:
        with transaction(self.connection) as db:
            db.execute("UPDATE meta SET value=value WHERE key='instance'")

    def _prepare(self) -> None:
        """Make the tables, or upgrade sound ones. Raises DamagedDatabaseError, OtherVersion."""
        version: int = self.connection.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, *UPGRADES, VERSION):
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
            raise self._damage_error(problem)
        if version == 0:
            with transaction(self.connection) as db:
                self._execute(SCHEMA + KEYS + ";".join(ADDITIONS))
                db.execute("INSERT INTO meta VALUES ('instance', ?)", (uuid.uuid4().hex[:12],))
                db.execute(f"PRAGMA user_version={VERSION}")
        for old_version in range(version or VERSION, VERSION):
            with transaction(self.connection) as db:
                self._execute(UPGRADES[old_version])
                db.execute(f"PRAGMA user_version={old_version + 1}")
        seal_changes(self.connection)
        if 0 < version < VERSION:
            self._seal_all()
        if (problem := broken_seal(self.connection)) is not None:
            raise self._damage_error(problem)
        if self.connection.execute("SELECT 1 FROM meta WHERE key='instance'").fetchone() is None:
            raise self._damage_error("it does not name its installation")

    def _seal_all(self) -> None:
        with transaction(self.connection) as db:
            for table, columns in SEALED_COLUMNS.items():
                db.execute(f"UPDATE {table} SET seal=seal_of({columns})")  # noqa: S608

    def _execute(self, statements: str) -> None:
        for statement in statements.split(";"):
            self.connection.execute(statement)

    def _damage_error(self, problem: str) -> DamagedDatabaseError:
        damage = DamagedDatabaseError(
            f"The database {self.path} is damaged: {problem}.",
            hint="Move the file away to start with an empty database.",
        )
        damage.problem = problem
        return damage

    @contextmanager
    def _translate_errors(self, doing: str) -> Iterator[None]:
        """Turn an error of the database into one of the store, and remember a failed write."""
        try:
            yield
            # The journal takes small changes on a full disk, and the next one can fail again.
            if (
                doing == "written"
                and self._write_error is not None
                and disk_fault(self.path.parent) is None
            ):
                self._write_error = None
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            # The text of an error can contain bytes of a damaged file.
            code = (
                sqlite3.SQLITE_CORRUPT
                if isinstance(error, UnicodeDecodeError)
                else getattr(error, "sqlite_errorcode", None)
            )
            if doing == "opened" and code is not None and code & 0xFF not in HARMLESS_CODES:
                raise self._damage_error(str(error)) from None
            if (
                doing != "opened"
                and self._mirror is not None
                and self._mirror.damage is None
                and code is not None
                and code & 0xFF in DAMAGE_CODES
            ):
                self._mirror.record_damage(str(error))
            if doing == "written":
                self._write_error = str(error)
            # The text of an error of SQLite can contain bytes of a damaged file.
            problem_words = f"The database {self.path} could not be {doing}"
            if isinstance(error, UnicodeDecodeError):
                raise StoreError(
                    f"{problem_words}: {error}. Nothing was changed.", hint="Restore a backup."
                ) from None
            raise unwritten_error(problem_words, self.path.parent, error) from None
