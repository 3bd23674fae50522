"""The files of a database: their states, readers, mirror, and the replacement of a damaged one."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
import uuid
from pathlib import Path
from typing import NamedTuple

_JOURNALS = ("-wal", "-shm")


class Stamp(NamedTuple):
    """The state of a file by its inode. Every write changes `ctime_ns`; zeros: no file."""

    device: int = 0
    inode: int = 0
    size: int = 0
    ctime_ns: int = 0


def stamp(path: Path) -> Stamp:
    try:
        status = path.stat()
    except OSError:
        return Stamp()
    return Stamp(status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)


def difference(former_stamp: Stamp | None, current_stamp: Stamp) -> str | None:
    """The end or exchange of a file, in words; None: it is the same file."""
    if current_stamp == Stamp():
        return "the file is gone"
    if former_stamp is not None and former_stamp[:2] != current_stamp[:2]:
        return "another file is in its place"
    return None


def mirror_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.mirror")


def make_private(path: Path) -> None:
    """Make an empty file with mode 0600, unless there is one. SQLite's other files get its mode."""
    if not path.exists():
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


def reader(
    path: Path, timeout_s: float = 1.0, *, is_unchanging: bool = False
) -> sqlite3.Connection:
    """A new connection that sees the file and no page in memory. Raises sqlite3.Error.

    timeout_s: the wait for a lock.
    is_unchanging: read without a shared memory file, which SQLite cannot make in a read-only
        folder.
    """
    options = "mode=ro&immutable=1" if is_unchanging else "mode=ro"
    return sqlite3.connect(f"{path.absolute().as_uri()}?{options}", uri=True, timeout=timeout_s)


def remove(path: Path) -> None:
    """Remove a database with its journals. Raises OSError."""
    for ending in ("", *_JOURNALS):
        path.with_name(path.name + ending).unlink(missing_ok=True)


def write(source: sqlite3.Connection, path: Path) -> None:
    """Write a new database with the content of an open one. Raises OSError, sqlite3.Error."""
    make_private(path)
    with contextlib.closing(sqlite3.connect(path)) as target:
        source.backup(target)


def put_back(source: sqlite3.Connection, path: Path) -> Path:
    """Replace a damaged file by the content of `source`. Returns the damaged file's new path.

    There is a file at `path` at every moment, because a gateway without one starts empty. Raises
    OSError, sqlite3.Error.
    """
    replacement = path.with_name(f"{path.name}.restored")
    damaged_path = free_name(path)
    remove(replacement)
    write(source, replacement)
    with contextlib.suppress(FileNotFoundError):
        os.link(path, damaged_path)
    # A journal of the damaged file would be applied to the new one.
    move_journals(path, damaged_path)
    replacement.replace(path)
    return damaged_path


def free_name(path: Path) -> Path:
    """The path for a damaged file, with the time."""
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return path.with_name(f"{path.name}.damaged-{moment}-{uuid.uuid4().hex[:4]}")


def move_journals(path: Path, target: Path) -> None:
    for ending in _JOURNALS:
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + ending).rename(target.with_name(target.name + ending))
