from __future__ import annotations

import asyncio
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
