"""The mirror of a database: a second file with each change, which replaces a damaged file.

SQLite keeps pages in memory and would go on over a file that others have changed. So `look` and
each change compare the file with the written content.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

from gateway.errors import StoreError
from gateway.logging import Logger
from gateway.store import database_files
from gateway.store.recorded_connection import Statement, transaction
from gateway.store.seals import broken_seal, compute_seal, seal_changes, seal_sums

log = Logger("fitserve.store")

# Seconds between two checks of a whole file that has changed, and their largest part of a core.
_INSPECTION_S = 5.0
_INSPECTION_SHARE = 0.01
# A damaged file is replaced once it was not written for so long.
_REST_S = 10.0
# Changes that a mirror may lack before it is recreated.
_MAX_PENDING = 1000
# Primary result codes that do not mean damage to the file.
HARMLESS_CODES = frozenset(
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
# Primary result codes of a file that is not a sound database any more.
DAMAGE_CODES = frozenset((sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB))


class Mirror:
    """The mirror of an open database, with the state of the database's file.

    The caller holds the lock of the database, and passes its connection as `source`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connection: sqlite3.Connection | None = None
        """Made with the first change or look, because its writing takes time."""
        self.damage: str | None = None
        self._stamp = database_files.stamp(path)
        """The state of the file after the last change."""
        self._pending: list[list[Statement]] = []
        """Changes that the mirror lacks."""
        self._damaged_at = self._inspected_at = self._inspection_s = 0.0
        self._has_changed = False
        """Whether the file has changed since the last inspection."""

    def add(self, statements: list[Statement], source: sqlite3.Connection) -> None:
        """Give the mirror the statements of a change. The change is on the disk already."""
        self._stamp = database_files.stamp(self.path)
        self._has_changed = True
        self._pending.append(statements)
        if self.connection is None or len(self._pending) > _MAX_PENDING:
            self._make(source)
            return
        try:
            self._write_pending(self.connection)
        except sqlite3.Error as error:
            log.warning("the mirror of the database could not be written", error=str(error))
            if getattr(error, "sqlite_errorcode", 0) & 0xFF not in HARMLESS_CODES:
                self._make(source)

    def inspect(self, source: sqlite3.Connection) -> bool:
        """Inspect the file. Returns whether it is damaged and rests, so that it can be replaced."""
        now = time.monotonic()
        stamp = database_files.stamp(self.path)
        if self.damage is not None:
            if stamp != self._stamp:
                self._stamp = stamp
                self._damaged_at = now
            return now > self._damaged_at + _REST_S
        if self.connection is None:
            self._make(source)
        rest_s = max(_INSPECTION_S, self._inspection_s / _INSPECTION_SHARE)
        if stamp != self._stamp or (self._has_changed and now > self._inspected_at + rest_s):
            self._inspect(source)
        return False

    def refuse_damage(self, source: sqlite3.Connection) -> None:
        """Raise StoreError if the file is damaged, or was changed by others to its damage."""
        if self.damage is None and database_files.stamp(self.path) != self._stamp:
            self._inspect(source)
        if self.damage is not None:
            raise StoreError(
                f"The database {self.path} was damaged while the gateway ran: {self.damage}."
                " Nothing was changed.",
                hint="Its last good state is put back in some seconds; see the gateway's log.",
            )

    def record_damage(self, problem: str) -> None:
        self.damage = problem
        self._damaged_at = time.monotonic()
        log.error(
            "the database was damaged while open; changes are refused until its last good state"
            " is put back",
            file=str(self.path),
            problem=problem,
        )

    def content(self) -> sqlite3.Connection | None:
        """The sound mirror with every change; None: there is none. Raises sqlite3.Error."""
        self._damaged_at = time.monotonic()
        if self.connection is None:
            return None
        self._write_pending(self.connection)
        if (problem := broken_seal(self.connection)) is not None:
            log.error("the mirror of the database is damaged too", problem=problem)
            return None
        return self.connection

    def record_repair(self, damaged_path: Path) -> None:
        self.damage = None
        self._stamp = database_files.stamp(self.path)
        log.error(
            "the last good state of the database was put back",
            file=str(self.path),
            damaged=str(damaged_path),
        )

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = None

    def _write_pending(self, mirror: sqlite3.Connection) -> None:
        """Write the pending changes; written ones are no longer pending. Raises sqlite3.Error."""
        while self._pending:
            with transaction(mirror):
                for sql, rows in self._pending[0]:
                    mirror.executemany(sql, rows)
            del self._pending[0]

    def _make(self, source: sqlite3.Connection) -> None:
        """Copy the sound database into a new mirror. Without room there is none for now."""
        path = database_files.mirror_of(self.path)
        self.close()
        try:
            database_files.remove(path)
            database_files.write(source, path)
            mirror = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            # Less than the database's FULL: a power cut may damage the mirror. SQLite ends a
            # damaged journal early, so the mirror too has all changes in its file.
            mirror.execute("PRAGMA journal_mode=WAL")
            mirror.execute("PRAGMA synchronous=OFF")
            mirror.execute("PRAGMA wal_autocheckpoint=1")
            seal_changes(mirror)
        except (sqlite3.Error, OSError) as error:
            log.warning("the database has no mirror", file=str(path), error=str(error))
            return
        self.connection = mirror
        self._pending.clear()

    def _inspect(self, source: sqlite3.Connection) -> None:
        """Read the whole file, and note its damage."""
        start_s = time.monotonic()
        stamp = database_files.stamp(self.path)
        self._has_changed = False
        problem = database_files.difference(self._stamp, stamp) or self._problem_of_file()
        if problem is None and self.connection is not None and not self._pending:
            problem = self._compare(self.connection, source, is_foreign=stamp != self._stamp)
        self._stamp = stamp
        self._inspected_at = time.monotonic()
        self._inspection_s = self._inspected_at - start_s
        if problem is not None:
            self.record_damage(problem)

    def _problem_of_file(self) -> str | None:
        """The damage of the file as a new reader sees it, without the pages in memory."""
        try:
            with closing(database_files.reader(self.path)) as file:
                problem = str(file.execute("PRAGMA integrity_check(1)").fetchone()[0])
                file.create_function("seal_of", -1, compute_seal, deterministic=True)
                return problem if problem != "ok" else broken_seal(file)
        except sqlite3.Error as error:
            code = error.sqlite_errorcode & 0xFF
            return str(error) if code not in HARMLESS_CODES else None
        except UnicodeDecodeError as error:
            return str(error)

    def _compare(
        self, mirror: sqlite3.Connection, source: sqlite3.Connection, *, is_foreign: bool
    ) -> str | None:
        """The problem of a sound file whose rows are not those of its mirror.

        is_foreign: others have written to the file. Without that the mirror is wrong, and is made
        again.
        """
        try:
            with closing(database_files.reader(self.path)) as file:
                if seal_sums(file) == seal_sums(mirror):
                    return None
            is_sound = broken_seal(mirror) is None
        except (sqlite3.Error, UnicodeDecodeError):
            is_sound = False
        if is_sound and is_foreign:
            return "it has other rows than the gateway wrote"
        self._make(source)
        return None
