"""Readings of all machines: each call gets one that began after it, and many calls share one."""

from __future__ import annotations

import asyncio

import pytest

from gateway.hosts.cluster.shared_reading import SharedReading


class Machines:
    """Machines that answer once they are let. Each reading has the number of its begin."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.fails = False
        self.reading = SharedReading(self._read)

    async def _read(self) -> int:
        number = self.reading.count
        await self.answers.wait()
        if self.fails:
            raise OSError("no machine answers")
        return number


async def begin(machines: Machines, count: int) -> list[asyncio.Task[int]]:
    """So many calls, each of which waits."""
    calls = [asyncio.create_task(machines.reading.result()) for _ in range(count)]
    await asyncio.sleep(0)
    return calls


def test_calls_that_wait_for_a_reading_share_the_next_one() -> None:
    async def play() -> list[int]:
        machines = Machines()
        first = await begin(machines, 1)
        later = await begin(machines, 800)
        machines.answers.set()
        return await asyncio.gather(*first, *later)

    assert asyncio.run(play()) == [1] + [2] * 800


def test_a_reading_that_fails_or_is_given_up_is_nobody_elses() -> None:
    async def play() -> list[int | BaseException]:
        machines = Machines()
        machines.fails = True
        first = await begin(machines, 1)
        later = await begin(machines, 2)
        machines.answers.set()
        with pytest.raises(OSError, match="no machine"):
            await first[0]
        machines.fails = False
        machines.answers.clear()
        await asyncio.sleep(0)
        later[0].cancel()
        await asyncio.sleep(0)
        machines.answers.set()
        return await asyncio.gather(*later, return_exceptions=True)

    cancelled_call, answer = asyncio.run(play())
    assert isinstance(cancelled_call, asyncio.CancelledError)
    assert answer == 3
