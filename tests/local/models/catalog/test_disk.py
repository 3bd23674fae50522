"""The program that reads the disk, whose reader may leave."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from gateway import worker_process
from gateway.models.catalog import disk
from gateway.models.catalog.disk import DiskJob, read_disk

pytestmark = pytest.mark.anyio


async def test_the_program_ends_with_a_reading_that_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, processes = str(tmp_path), asyncio.Queue[asyncio.subprocess.Process]()

    async def spawn(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        child = await worker_process.spawn(*arguments, **options)
        child.send_signal(signal.SIGSTOP)  # as on a mount that hangs
        processes.put_nowait(child)
        return child

    monkeypatch.setattr(disk, "spawn", spawn)
    reading = asyncio.create_task(read_disk(DiskJob(folder, folder, folder)))
    child = await processes.get()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert child.returncode == -signal.SIGKILL
