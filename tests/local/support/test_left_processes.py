"""The check at the end of each test names a process that an event loop left."""

from __future__ import annotations

import asyncio
import threading

from tests.support.left_processes import remaining


async def _begin(*command: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(*command)


async def _ended_process() -> int:
    return await (await _begin("true")).wait()


def test_a_process_that_an_event_loop_left_is_named_once() -> None:
    other_threads = {*threading.enumerate()}
    with asyncio.Runner() as runner:
        assert runner.run(_ended_process()) == 0
        child = runner.run(_begin("sleep", "1000"))
        assert not remaining(), "its event loop lives"
    assert [f"pid={child.pid} running" in name for name in remaining()] == [True]
    assert not remaining()
    transport = child._transport  # type: ignore[attr-defined]
    transport.close()
    for waiting in {*threading.enumerate()} - other_threads:
        waiting.join()
    transport._proc.wait()
