"""A program that is ended tells how it ended, also when others want the processor."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter

import pytest

from gateway import worker_process
from gateway.worker_process import kill
from tests.support.patience import wait_until

pytestmark = pytest.mark.anyio


async def test_the_exit_code_of_a_killed_process_is_that_of_the_kill() -> None:
    over, codes = threading.Event(), Counter[int | None]()

    def busy() -> None:
        while not over.is_set():
            sum(range(1000))

    busy_threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in busy_threads:
        thread.start()
    try:
        for _ in range(40):
            child = await asyncio.create_subprocess_exec(
                "sleep", "1000", stdin=-1, stdout=-1, start_new_session=True
            )
            codes[await kill(child)] += 1
    finally:
        over.set()
        for thread in busy_threads:
            thread.join()
    assert codes == {-9: 40}


async def test_a_caller_that_is_cancelled_waits_for_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end is reported late, as on a busy machine."""
    child = await asyncio.create_subprocess_exec(
        "sleep", "1000", stdin=-1, stdout=-1, start_new_session=True
    )
    transport = child._transport  # type: ignore[attr-defined]
    report_event, exit_event = asyncio.Event(), transport._process_exited

    async def report(code: int) -> None:
        await report_event.wait()
        exit_event(code)

    reports = list[asyncio.Task[None]]()
    monkeypatch.setattr(
        transport,
        "_process_exited",
        lambda code: reports.append(asyncio.create_task(report(code))),
    )
    killing = asyncio.create_task(kill(child))
    await wait_until("the exit is reported", lambda: reports)
    killing.cancel()
    await asyncio.sleep(0.01)
    assert not killing.done()
    report_event.set()
    with pytest.raises(asyncio.CancelledError):
        await killing
    assert child.returncode == -9


async def test_a_process_that_cannot_be_killed_holds_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a system call on a dead mount: the signal has no effect."""
    monkeypatch.setattr(worker_process, "_LONG_EXIT_TIMEOUT_S", 0.1)
    child = await asyncio.create_subprocess_exec(
        "sleep", "1000", stdin=-1, stdout=-1, start_new_session=True
    )
    with monkeypatch.context() as patch:
        patch.setattr(child, "kill", lambda: None)
        assert await kill(child) is None
    assert child.returncode is None
    assert await kill(child) == -9


async def test_bytes_that_a_killed_program_never_read_are_no_error() -> None:
    """A pipe breaks with bytes in it; the event loop reports the errors that nothing retrieved."""
    reports = list[object]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: reports.append(context))
    try:
        child = await asyncio.create_subprocess_exec(
            "sleep", "1000", stdin=-1, stdout=-1, start_new_session=True
        )
        assert child.stdin is not None
        child.stdin.write(bytes(2**22))
        assert await kill(child) == -9
        del child
        gc.collect()
        await asyncio.sleep(0)
    finally:
        loop.set_exception_handler(None)
    assert reports == []
