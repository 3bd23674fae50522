"""The words for a folder that cannot be written. Real file systems: tests/e2e/test_disk.py."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from gateway.disk_fault import disk_fault, unwritten_error, write_error

WORDS = {
    errno.EROFS: ("is read-only", "Mount it for writing"),
    errno.ENOSPC: ("no space is left", "Free disk space"),
    errno.EDQUOT: ("no space is left", "Free disk space"),
    errno.EACCES: ("has no permission", "Repair owner and permissions"),
    errno.EPERM: ("has no permission", "Repair owner and permissions"),
    errno.EIO: ("input/output errors", "Repair or replace the disk"),
    errno.EFBIG: ("reached the size", "Raise that limit"),
}


@pytest.mark.parametrize("number", sorted(WORDS))
def test_the_error_of_a_write_names_folder_cause_and_cure(tmp_path: Path, number: int) -> None:
    cause, cure = WORDS[number]
    error = unwritten_error(
        "The thing was not written", tmp_path, OSError(number, os.strerror(number))
    )
    assert error.status == 507
    assert cause in error.message
    assert str(tmp_path) in error.message
    assert "Nothing was changed." in error.message
    assert error.hint.startswith(cure)


def test_a_folder_that_can_be_written_has_no_fault(tmp_path: Path) -> None:
    assert disk_fault(tmp_path) is None
    error = unwritten_error(
        "The thing was not written", tmp_path, sqlite3.OperationalError("locked")
    )
    assert error.message == f"The thing was not written: locked in {tmp_path}. Nothing was changed."


@pytest.mark.parametrize("denied", [True, False])
def test_an_error_without_a_number_is_read_from_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, denied: bool
) -> None:
    # Root may write wherever the file system can be written.
    monkeypatch.setattr(os, "access", lambda *_: not denied)
    fault = disk_fault(tmp_path, sqlite3.OperationalError("attempt to write a readonly database"))
    assert (fault is not None and "no permission" in fault.cause) == denied


def test_an_error_of_sqlite_without_a_reason_is_asked_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE

    def refuse(_: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", refuse)
    fault = disk_fault(tmp_path, error)
    assert fault is not None
    assert "no space is left" in fault.cause
    assert not [*tmp_path.iterdir()]


def test_a_file_that_the_disk_refuses_is_named() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/keys.json")
    assert "/data/keys.json could not be written" in str(write_error(full))
    # A write to an open file has no name, and a refusal without one may be a connection's.
    assert "No space left" in str(write_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    assert write_error(OSError(errno.EPERM, os.strerror(errno.EPERM))) is None
    assert write_error(ConnectionResetError(errno.ECONNRESET, "reset")) is None
