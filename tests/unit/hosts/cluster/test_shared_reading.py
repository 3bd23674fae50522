"""Readings of all machines: each call gets one that began after it, and many calls share one."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest

from gateway.hosts.cluster.shared_reading import SharedReading


class Machines:
    """Machines that answer once they are let. Each reading has the number of its begin.

    gates: the gates by the number of the reading; it answers once the gate is set.
    """

    def __init__(self, failing: int = 0) -> None:
        """failing: the number of the reading that fails."""
        self.gates: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.failing = failing
        self.reading = SharedReading(self._read)

    async def _read(self) -> int:
        number = self.reading.count
        await self.gates[number].wait()
        if number == self.failing:
            raise OSError("no machine answers")
        return number

    async def begin(self, count: int) -> list[asyncio.Task[int]]:
        """So many calls, each of which waits."""
        calls = [asyncio.create_task(self.reading.result()) for _ in range(count)]
        await asyncio.sleep(0)
        return calls


def test_calls_that_wait_for_a_reading_share_the_next_one() -> None:
    async def play() -> list[int]:
        machines = Machines()
        first_calls = await machines.begin(1)
        later_calls = await machines.begin(800)
        machines.gates[1].set()
        machines.gates[2].set()
        return await asyncio.gather(*first_calls, *later_calls)

    assert asyncio.run(play()) == [1] + [2] * 800


def test_no_other_call_gets_a_reading_that_fails_or_is_given_up() -> None:
    async def play() -> int:
        machines = Machines(failing=1)
        (first_call,) = await machines.begin(1)
        cancelled_call, last_call = await machines.begin(2)
        machines.gates[1].set()
        with pytest.raises(OSError, match="no machine"):
            await first_call
        while machines.reading.count < 2:
            await asyncio.sleep(0)
        cancelled_call.cancel()
        machines.gates[3].set()
        return await last_call

    assert asyncio.run(play()) == 3
