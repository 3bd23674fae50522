"""Engine logs copied to files, and followed while they grow."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import pytest

from gateway.store import engine_logs
from tests.support.patience import hang_s

pytestmark = pytest.mark.anyio


async def test_a_log_that_is_followed_before_it_is_there_is_read_from_its_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_logs, "_POLL_S", 0.01)
    path, looks, runs = tmp_path / "m-r0-a1.log", 0, True

    def follow() -> bool:
        nonlocal looks
        looks += 1
        return runs

    read: list[bytes] = []

    async def reading() -> None:
        async for piece in engine_logs.read_log(path, tail=500, follow=follow):
            read.append(piece)  # noqa: PERF401 - it is looked at while it grows

    task = asyncio.create_task(reading())
    async with asyncio.timeout(hang_s()):
        while looks < 3:
            await asyncio.sleep(0.01)
        assert read == []
        path.write_bytes(b"first\n")
        while b"".join(read) != b"first\n":
            await asyncio.sleep(0.01)
        runs = False
        await task


async def test_a_start_that_ended_before_it_printed_has_no_log(tmp_path: Path) -> None:
    for follow in (None, lambda: False):
        assert [
            piece
            async for piece in engine_logs.read_log(tmp_path / "gone.log", tail=None, follow=follow)
        ] == []


async def test_lines_that_the_disk_does_not_take_are_counted(tmp_path: Path) -> None:
    path = engine_logs.log_path(tmp_path, "i")
    copy = engine_logs.LogCopy(path)
    copy.write(b"first")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))
    try:
        copy.write(b"second")
        copy.write(b"third")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    copy.write(b"fourth")
    copy.close()
    assert path.read_bytes() == b"first\n(lines without room on the disk: 2)\nfourth\n"


async def test_a_copy_begins_once_its_folder_can_be_made(tmp_path: Path) -> None:
    path = engine_logs.log_path(tmp_path, "i")
    path.parent.write_text("in the way")
    copy = engine_logs.LogCopy(path)
    copy.write(b"first")
    path.parent.unlink()
    copy.write(b"second")
    copy.close()
    assert path.read_bytes() == b"(lines without room on the disk: 1)\nsecond\n"


def test_logs_of_a_model_go_wherever_its_engine_ran(tmp_path: Path) -> None:
    paths = [engine_logs.log_path(tmp_path, "i", is_in_cluster=place) for place in (False, True)]
    for path in paths:
        engine_logs.LogCopy(path).close()
        path.with_suffix(".log.1").touch()
    assert len({*paths}) == 2
    engine_logs.remove_logs(tmp_path, "i")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
