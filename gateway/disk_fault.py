"""The reasons why a folder cannot be written, in words for operators."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gateway.errors import StoreError

if TYPE_CHECKING:
    import sqlite3

# The next change would fail again with fewer free bytes.
ROOM_BYTES = 1024 * 1024
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_PERMISSION = frozenset({errno.EACCES, errno.EPERM})
# These codes equal those of sqlite3, which a plan does not load.
_SQLITE_FULL = 13
_SQLITE_IOERR = 10
# Numbers of errors of the system that a disk causes.
DISK_ERRORS = _NO_SPACE | _NO_PERMISSION | {errno.EROFS, errno.EIO, errno.EFBIG}
# Bytes of a write that shows why a disk refuses another one.
_TRIAL_BYTES = 64 * 1024


class DiskFault(NamedTuple):
    """The fault of a folder, and its cure: a clause and an imperative without a full stop."""

    cause: str
    cure: str


def disk_fault(folder: Path, error: BaseException | None = None) -> DiskFault | None:
    """Why the folder cannot be written; None: nothing is known.

    error: the error of a write into the folder. Where it has no system error number, as with
        SQLite, the state of the folder gives the reason.
    """
    number = error.errno if isinstance(error, OSError) else None
    if (getattr(error, "sqlite_errorcode", 0) & 0xFF) == _SQLITE_FULL:
        number = errno.ENOSPC
    elif (getattr(error, "sqlite_errorcode", 0) & 0xFF) == _SQLITE_IOERR:
        number = _trial(folder)
    if number == errno.EROFS or (number is None and _is_read_only(folder)):
        return DiskFault(
            f"the file system of {folder} is read-only",
            "Mount it for writing (after a fault of the disk, `dmesg` has the reason)",
        )
    if number in _NO_SPACE or (number is None and _is_full(folder)):
        return DiskFault(
            f"no space is left in {folder}", f"Free disk space on the file system of {folder}"
        )
    if number in _NO_PERMISSION or (number is None and not os.access(folder, os.W_OK | os.X_OK)):
        return DiskFault(
            f"the user of the gateway (uid {os.geteuid()}) has no permission to write in {folder}",
            f"Repair owner and permissions of {folder}",
        )
    if number == errno.EFBIG:
        return DiskFault(
            f"a file in {folder} has reached the size that this process may write",
            "Raise that limit (`ulimit -f`, LimitFSIZE of a unit)",
        )
    if number == errno.EIO:
        return DiskFault(
            f"the disk of {folder} answers with input/output errors",
            f"Repair or replace the disk of {folder} (`dmesg` has the reason)",
        )
    return None


def write_error(error: OSError) -> StoreError | None:
    """The error in words of a file that a disk did not take; None: the disk is not the cause."""
    if error.errno not in DISK_ERRORS:
        return None
    if isinstance(error.filename, str | bytes):
        path = Path(os.fsdecode(error.filename))
        return unwritten_error(f"{path} could not be written", path.parent, error, "")
    if error.errno in _NO_PERMISSION:  # of a connection as well
        return None
    return StoreError(
        f"A file could not be written: {error.strerror}.",
        hint="Free disk space, or repair the disk, then try again.",
    )


def unwritten_error(
    path_words: str,
    folder: Path,
    error: OSError | sqlite3.Error,
    effect: str = "Nothing was changed.",
) -> StoreError:
    """The error of a change that could not be written: `path_words` with a verb, folder, reason,
    effect and cure."""
    reason = getattr(error, "strerror", None) or str(error)
    fault = disk_fault(folder, error)
    cause, cure = fault or (f"{reason} in {folder}", f"Repair the disk of {folder}")
    return StoreError(f"{path_words}: {cause}. {effect}".rstrip(), hint=f"{cure}, then try again.")


def _trial(folder: Path) -> int | None:
    """The number of the error that a write into the folder meets now; None: it succeeds."""
    import tempfile  # not before there is a fault

    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"\0" * _TRIAL_BYTES)
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno
    return None


def _is_read_only(folder: Path) -> bool:
    try:
        return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def _is_full(folder: Path) -> bool:
    """Whether there is no room for a change: bytes or files."""
    try:
        counts = os.statvfs(folder)
    except OSError:
        return False
    return counts.f_bavail * counts.f_frsize < ROOM_BYTES or (
        counts.f_files > 0 and counts.f_favail == 0
    )
