"""Turns of batches that read lines ahead: bounded, by key, and the oldest batch first."""

from __future__ import annotations

import asyncio

import pytest

from gateway.server.batches import reading_turns
from gateway.server.batches.reading_turns import ReadingTurns

pytestmark = pytest.mark.anyio


class Readers:
    """Batches that read. order: names of those that began, in order."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self._turns = ReadingTurns()
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, name: str, made_at: float, owner: str = "a") -> None:
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._read(name, made_at, owner))
        await settle()

    async def _read(self, name: str, made_at: float, owner: str) -> None:
        async with self._turns.turn(owner, made_at):
            self.order.append(name)
            await self._ends[name].wait()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settle()

    async def cancel(self, *names: str) -> None:
        for name in names:
            self._tasks[name].cancel()
        await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_oldest_batch_that_waits_is_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_turns, "MAX_TURNS", 1)
    readers = Readers()
    await readers.begin("first", 5)
    await readers.begin("young", 9)
    await readers.begin("old", 1)
    assert readers.order == ["first"]
    for name in ("first", "old", "young"):
        await readers.end(name)
    assert readers.order == ["first", "old", "young"]


async def test_a_key_leaves_turns_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_turns, "MAX_TURNS", 2)
    monkeypatch.setattr(reading_turns, "MAX_TURNS_OF_KEY", 1)
    readers = Readers()
    await readers.begin("a-1", 1)
    await readers.begin("a-2", 2)
    await readers.begin("b-1", 3, owner="b")
    assert readers.order == ["a-1", "b-1"]
    await readers.end("a-1")
    assert readers.order == ["a-1", "b-1", "a-2"]
    await readers.cancel("b-1", "a-2")


async def test_a_batch_that_ends_while_it_waits_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading_turns, "MAX_TURNS", 1)
    readers = Readers()
    for made_at, name in enumerate("xyz"):
        await readers.begin(name, made_at)
    await readers.end("x")
    await readers.cancel("y")
    assert readers.order == ["x", "y", "z"]
    await readers.begin("late", 9)
    await readers.begin("gone", 8)
    await readers.cancel("gone")
    await readers.end("z")
    assert readers.order == ["x", "y", "z", "late"]
    await readers.cancel("late")
