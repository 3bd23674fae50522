"""The data folder is closed to other users, also one that an older gateway left open."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.errors import SettingsError
from gateway.store import data_folder
from gateway.store.data_folder import close_data_folder, is_in_use, lock
from gateway.store.database import Database
from tests.support.log_lines import capture_logs
from tests.support.patience import Clock


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    umask = os.umask(0o022)
    yield
    os.umask(umask)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_new_folder_is_closed(tmp_path: Path) -> None:
    close_data_folder(tmp_path / "new" / "data")
    assert mode(tmp_path / "new" / "data") == 0o700


def test_an_open_folder_is_closed_with_all_that_is_in_it_and_a_line_in_the_log(
    tmp_path: Path,
) -> None:
    data, outside = tmp_path / "data", tmp_path / "outside"
    for file in (
        "fitserve.db",
        "logs/a.log",
        "run/a/deep/file",
        "models/org--name/weights",
        "run/models/file",
    ):
        (data / file).parent.mkdir(parents=True, exist_ok=True)
        (data / file).touch()
    outside.mkdir()
    (data / "link").symlink_to(outside)
    with capture_logs() as lines:
        close_data_folder(data)
    assert [(line["log_level"], line["mode"]) for line in lines] == [("warning", "0o755")]
    names = (
        "fitserve.db",
        "logs",
        "logs/a.log",
        "run",
        "run/a",
        "run/a/deep",
        "run/a/deep/file",
        "run/models",
        "run/models/file",
    )
    assert [oct(mode(data / path) & 0o077) for path in (".", *names)] == ["0o0"] * (1 + len(names))
    assert lines[0]["files"] == len(names)
    # Files that engines in containers read stay readable behind the closed folder, and the target
    # of a link is not ours.
    assert mode(data / "models/org--name/weights") == 0o644
    assert mode(outside) == 0o755
    with capture_logs() as lines:
        close_data_folder(data)
    assert not lines


def test_a_folder_that_all_users_share_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(SettingsError, match="share"):
        close_data_folder(tmp_path)
    assert mode(tmp_path) == 0o1777


def test_the_files_beside_the_database_are_as_closed_as_the_database(tmp_path: Path) -> None:
    """A reader of the -shm file could take a lock there that stops every change."""
    database = Database(tmp_path / "fitserve.db")
    try:
        files = {path.name: oct(mode(path)) for path in tmp_path.iterdir()}
    finally:
        database.close()
    assert files == dict.fromkeys(("fitserve.db", "fitserve.db-wal", "fitserve.db-shm"), "0o600")


def test_a_folder_is_in_use_while_its_lock_is_held_and_looking_takes_no_lock(
    tmp_path: Path,
) -> None:
    assert not is_in_use(tmp_path)
    with (
        (tmp_path / "gateway.lock").open("w") as file,
        (tmp_path / "gateway.lock").open() as second_file,
    ):
        assert not is_in_use(tmp_path)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert is_in_use(tmp_path)
        assert not is_in_use(tmp_path, proc=tmp_path), "what cannot be read is not in use"
        fcntl.flock(file, fcntl.LOCK_UN)
        fcntl.flock(second_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        assert not is_in_use(tmp_path)


def shared_lock(folder: Path, owner: int, seconds: str) -> subprocess.Popen[bytes]:
    """A program that has the lock of a gateway, for so long."""
    with (folder / "gateway.lock").open("w") as file:
        file.write(str(owner))
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        return subprocess.Popen(["sleep", seconds], pass_fds=(file.fileno(),))


def dead_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
        return process.pid


def test_the_lock_of_a_dead_gateway_is_awaited(tmp_path: Path) -> None:
    """A program that it was starting at its death has it for a moment."""
    with shared_lock(tmp_path, dead_pid(), "0.3"):
        os.close(lock(tmp_path))
    assert (tmp_path / "gateway.lock").read_text() == str(os.getpid())


def test_a_lock_that_is_never_free_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_folder, "_DEATH_S", 0.1)
    pid = dead_pid()
    with shared_lock(tmp_path, pid, "600") as program:
        with pytest.raises(SettingsError, match=f"process {pid}"):
            lock(tmp_path)
        program.kill()


def test_the_lock_of_a_gateway_that_lives_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_folder, "time", Clock())
    with shared_lock(tmp_path, os.getpid(), "600") as program:
        with pytest.raises(SettingsError, match="Another gateway"):
            lock(tmp_path)
        program.kill()
