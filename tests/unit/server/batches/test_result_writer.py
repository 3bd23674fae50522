"""The writer of results: its end after a disk that is slow, or takes nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gateway.server.batches import result_writer
from gateway.server.batches.file_store import FileStore, Quotas, new_id
from gateway.server.batches.file_threads import FileThreads
from gateway.server.batches.records import BatchRecord
from gateway.server.batches.result_file import failure_result, result_id
from gateway.server.batches.result_writer import LineResult, ResultWriter
from tests.support.dataplane import until
from tests.support.patience import HANG_S

pytestmark = pytest.mark.anyio

LINES = 3
RECORD = BatchRecord(
    id=new_id("batch_"),
    owner="a",
    key_name="app",
    endpoint="/v1/completions",
    input_file_id="file-1",
    completion_window="24h",
    metadata=None,
    made_at=time.time(),
    expires_at=time.time() + 1000,
    output_id=new_id("file-"),
    error_id=new_id("file-"),
    output_s=1000,
    total=LINES,
)

Write = Callable[[Sequence[LineResult]], None]


def result(number: int) -> LineResult:
    text = failure_result(result_id(RECORD.id, number), f"line-{number}", "code", "words")
    return LineResult(number, text, is_error=False)


async def open_writer(
    folder: Path, write_with: Callable[[Write, Sequence[LineResult]], None]
) -> tuple[FileStore, ResultWriter]:
    """A writer whose results are written by a function of the test."""
    store = FileStore(folder, Quotas(10_000, 10_000, 10_000, 30))
    threads = FileThreads()
    writer = ResultWriter(RECORD, store, threads, lambda error: pytest.fail(str(error)))
    await threads.run(writer.open)
    write = writer.write
    writer.write = lambda results: write_with(write, results)  # type: ignore[method-assign]
    return store, writer


async def cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_results_that_came_before_a_stop_are_on_the_disk(tmp_path: Path) -> None:
    gate = threading.Event()
    groups: list[int] = []

    def write_slowly(write: Write, results: Sequence[LineResult]) -> None:
        groups.append(len(results))
        gate.wait(HANG_S)
        write(results)

    store, writer = await open_writer(tmp_path, write_slowly)
    adding = [asyncio.create_task(writer.add(result(0)))]
    await until(lambda: bool(groups))
    adding += [asyncio.create_task(writer.add(result(number))) for number in range(1, LINES)]
    await asyncio.sleep(0)
    await cancel(adding)
    closing = asyncio.create_task(writer.close())
    await asyncio.sleep(0)
    gate.set()
    await closing
    assert groups == [1, LINES - 1]
    content = store.path(RECORD.output_id).read_bytes()
    assert content == b"".join(result(number).text for number in range(LINES))


async def test_a_disk_that_takes_nothing_delays_a_stop_shortly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def refuse(_: Write, results: Sequence[LineResult]) -> None:
        tries.append(len(results))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(result_writer, "_LAST_WRITES_S", 0.01)
    store, writer = await open_writer(tmp_path, refuse)
    adding = asyncio.create_task(writer.add(result(0)))
    await until(lambda: bool(tries))
    await cancel([adding])
    await writer.close()
    assert len(tries) == 1
    assert not store.path(RECORD.output_id).exists()
