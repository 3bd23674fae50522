"""An error that nobody expected is told, and the work goes on."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from gateway import supervision
from gateway.supervision import ErrorBackoff, SupervisedTask
from tests.support.log_lines import capture_logs
from tests.support.patience import HANG_S, Clock, hang_s

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def log_records(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    monkeypatch.setattr(supervision, "FIRST_REST_S", 0.001)
    with capture_logs() as events:
        yield events


async def cancelled_inside() -> None:
    """The awaited task was cancelled by somebody else."""
    other_task = asyncio.create_task(asyncio.sleep(HANG_S))
    other_task.cancel()
    await other_task


async def raises(error: BaseException) -> None:
    raise error


def deep(depth: int = 0) -> int:
    return deep(depth + 1)


async def too_deep() -> None:
    deep()


@pytest.mark.parametrize(
    "bad",
    [
        cancelled_inside,
        too_deep,
        *(
            lambda error=error: raises(error)
            for error in (ValueError("x"), MemoryError(), OSError(24, "x"))
        ),
    ],
)
async def test_work_goes_on_after_any_error(
    bad: Callable[[], Awaitable[None]], log_records: list[dict[str, Any]]
) -> None:
    problems: list[str | None] = []
    event = asyncio.Event()

    async def step() -> float | None:
        if len(problems) < 3:
            problems.append(work.setback.problem)
            await bad()
        event.set()
        return None

    changes: list[str | None] = []
    work = SupervisedTask(step, "a test", lambda: changes.append(work.setback.problem), of="this")
    async with asyncio.timeout(hang_s()):
        await event.wait()
        while not work.is_done:
            await asyncio.sleep(0)
    assert problems[0] is None
    assert all(
        problem and problem.startswith("internal error: ") for problem in [*problems[1:], *changes]
    )
    assert len(changes) == 3
    assert [(event["work"], event["of"], event["log_level"]) for event in log_records] == 3 * [
        ("a test", "this", "error")
    ]
    assert all(isinstance(event["exc_info"], BaseException) for event in log_records)
    assert work.setback.problem is None
    await work.close()


async def test_work_that_is_ended_ends_in_every_state() -> None:
    async def waits() -> float:
        await asyncio.sleep(HANG_S)
        return 0.0

    async def fails() -> float:
        raise ValueError("x")

    async def fails_at_its_end() -> float:
        try:
            await asyncio.sleep(HANG_S)
        finally:
            raise ValueError("at the end")

    async def goes_on() -> float:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(HANG_S)
        return 0.0

    for step in (waits, fails, fails_at_its_end, goes_on):
        for turns in range(4):
            work = SupervisedTask(step, "a test")
            for _ in range(turns):
                await asyncio.sleep(0)
            async with asyncio.timeout(hang_s()):
                await work.close()
            assert work.is_done
    del work
    gc.collect()  # asyncio tells of an error that nobody asked a task for when the task goes


def test_pauses_double_up_to_a_minute_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(supervision, "time", clock)
    monkeypatch.setattr(supervision, "FIRST_REST_S", 1.0)
    setbacks = [ErrorBackoff("a test") for _ in range(20)]
    for seconds in (1, 2, 4, 8, 16, 32, 60, 60):
        for setback in setbacks:
            setback.record_failure(ValueError("x"))
        rests = [setback.rest_s for setback in setbacks]
        assert all(0.74 * seconds < rest_s < 1.26 * seconds for rest_s in rests)
        assert len(set(rests)) > 1
    for _ in range(100):
        setback.record_failure(ValueError("x"))
    clock.now += 76
    assert setback.rest_s == 0
    setback.clear()
    assert (setback.problem, setback.count) == (None, 0)


def test_the_words_of_an_error_break_no_terminal_and_no_json() -> None:
    setback = ErrorBackoff("a test")
    setback.record_failure(ValueError("\ud800\x1b[31m\n" + "x" * 10_000))
    assert setback.problem is not None
    assert setback.problem.isprintable()
    assert setback.problem.encode()
    assert len(setback.problem) < 400
