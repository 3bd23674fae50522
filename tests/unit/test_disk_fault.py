"""The words for a folder that cannot be written. Real file systems: tests/e2e/test_disk.py."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from gateway.disk_fault import disk_fault, unwritten

WORDS = {
    errno.EROFS: ("is read-only", "Mount it for writing"),
    errno.ENOSPC: ("no space is left", "Free disk space"),
    errno.EDQUOT: ("no space is left", "Free disk space"),
    errno.EACCES: ("has no permission", "Repair owner and permissions"),
    errno.EPERM: ("has no permission", "Repair owner and permissions"),
    errno.EIO: ("Input/output error", "Repair the disk"),
}


@pytest.mark.parametrize("number", sorted(WORDS))
def test_the_error_of_a_write_names_folder_cause_and_cure(tmp_path: Path, number: int) -> None:
    cause, cure = WORDS[number]
    error = unwritten("The thing was not written", tmp_path, OSError(number, os.strerror(number)))
    assert error.status == 507
    assert cause in error.message
    assert str(tmp_path) in error.message
    assert "Nothing was changed." in error.message
    assert error.hint.startswith(cure)


def test_a_folder_that_can_be_written_has_no_fault(tmp_path: Path) -> None:
    assert disk_fault(tmp_path) is None
    error = unwritten("The thing was not written", tmp_path, sqlite3.OperationalError("locked"))
    assert error.message == f"The thing was not written: locked in {tmp_path}. Nothing was changed."


@pytest.mark.parametrize("denied", [True, False])
def test_an_error_without_a_number_is_read_from_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, denied: bool
) -> None:
    # Root may write wherever the file system can be written.
    monkeypatch.setattr(os, "access", lambda *_: not denied)
    fault = disk_fault(tmp_path, sqlite3.OperationalError("attempt to write a readonly database"))
    assert (fault is not None and "no permission" in fault.cause) == denied
