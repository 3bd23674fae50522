"""The opening of the database, also if it is damaged, full or read-only.

Engines then keep running, and changes are refused.

    the file is                       opened                        the file
    sound                             the file                      -
    damaged, cut off, empty           its mirror, in its place      set aside, with the time
    the same, without a mirror        an empty database in memory   set aside, with the time
    of another version                an empty database in memory   left alone
    not writable, on a full disk      its copy in memory            written, as soon as possible
    not readable, locked              an empty database in memory   left alone

An empty database gets the running engines from their records (store/running_engines.py).
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from gateway.domain import Fact, MeasuredStart
from gateway.errors import StoreError
from gateway.logging import Logger
from gateway.store import atomic_file, database_files
from gateway.store.database import DamagedDatabaseError, Database, OtherVersion
from gateway.store.store import Store

log = Logger("fitserve.store")


def open_store(path: Path) -> Store:
    """The database at `path`; if it cannot be used, one in memory with the `problem`."""
    has_begun = installation_file(path).exists()
    if has_begun and path.exists() and path.stat().st_size == 0:
        return _set_aside(path, "the database was cut to nothing")
    try:
        return Store(path)
    except OtherVersion as error:
        return _memory_store(path, error.message.rstrip("."))
    except DamagedDatabaseError as error:
        return _set_aside(path, error.message.rstrip("."))
    except StoreError as error:
        problem = error.message.rstrip(".")
    if (copy := _copy_in_memory(path)) is not None:
        try:
            store = Store(path, copy=copy, problem=problem, returns=True)
            log.error("changes are refused until this is repaired", problem=problem)
            return store  # noqa: TRY300
        except OtherVersion as error:
            return _memory_store(path, error.message.rstrip("."))
        except StoreError as error:
            return _set_aside(path, error.message.rstrip("."))
    return _memory_store(path, problem, returns_rows=not path.exists())


def installation_id(path: Path, store: Store) -> str:
    """The id of this installation, which marks its engines.

    A file next to the database keeps it, also if the database is lost.
    """
    file = installation_file(path)
    with contextlib.suppress(OSError):
        if stored_id := file.read_text().strip():
            return stored_id
    identity = store.instance
    with contextlib.suppress(OSError):
        atomic_file.write(file, identity.encode())
    return identity


def records_at_rest(path: Path) -> tuple[list[Fact], list[MeasuredStart]]:
    """The facts and starts of a gateway that does not run; none if its database cannot be read.

    Nothing is written.
    """
    try:
        if (copy := _copy_in_memory(path)) is not None:
            store = Store(path, copy=copy)
            return store.facts(), store.starts.rows()
    except StoreError:
        pass
    return [], []


def installation_file(path: Path) -> Path:
    return path.with_name("installation")


def _copy_in_memory(path: Path) -> sqlite3.Connection | None:
    """A copy of the database in memory; None if the file cannot be read."""
    if not path.exists():
        return None
    for is_unchanging in (False, True):
        memory = _memory_database()
        try:
            with contextlib.closing(
                database_files.reader(path, is_unchanging=is_unchanging)
            ) as file:
                # A backup would wait for a lock for ever; a read gives up after a second.
                file.execute("SELECT 1 FROM sqlite_master").fetchone()
                file.backup(memory)
                return memory
        except sqlite3.Error:
            memory.close()
    return None


def _set_aside(path: Path, problem: str) -> Store:
    """The store of the mirror, else one in memory. The damaged file gets another name."""
    if (store := _restore_mirror(path, problem)) is not None:
        return store
    damaged_path = database_files.free_name(path)
    with contextlib.suppress(OSError):
        path.rename(damaged_path)
        database_files.move_journals(path, damaged_path)
        problem = (
            f"{problem} and was set aside as {damaged_path}; restore a backup, or restart to begin"
            " with the running engines"
        )
    return _memory_store(path, problem)


def _restore_mirror(path: Path, problem: str) -> Store | None:
    """The store with the content of the mirror; None: there is no sound one, or no room for it."""
    copy = _copy_in_memory(database_files.mirror_of(path))
    if copy is None:
        return None
    try:
        # The check of the mirror upgrades one of an older version.
        Database(path, copy=copy)
        damaged_path = database_files.put_back(copy, path)
        store = Store(path)
    except (StoreError, sqlite3.Error, OSError) as error:
        log.error("the mirror of the database cannot be used", error=str(error))  # noqa: TRY400
        return None
    finally:
        copy.close()
    log.error("the database was replaced by its mirror", problem=problem, damaged=str(damaged_path))
    return store


def _memory_store(path: Path, problem: str, *, returns_rows: bool = False) -> Store:
    log.error("changes are refused until this is repaired; engines keep running", problem=problem)
    return Store(path, copy=_memory_database(), problem=problem, returns=returns_rows)


def _memory_database() -> sqlite3.Connection:
    return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
