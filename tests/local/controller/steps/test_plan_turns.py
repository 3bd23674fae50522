"""Turns to plan: one at a time, the most urgent first, and each step gets its turn."""

from __future__ import annotations

import asyncio

import pytest

from gateway.controller.steps.plan_turns import PlanTurns, Urgency

pytestmark = pytest.mark.anyio


class Log:
    """Steps that take turns, in the order of their turns."""

    def __init__(self) -> None:
        self.turns, self.names = PlanTurns(), list[str]()
        self.inside = 0

    async def step(self, name: str, urgency: Urgency = Urgency.UNPLANNED) -> None:
        async with self.turns.turn(lambda: urgency):
            self.inside += 1
            assert self.inside == 1, "one at a time"
            self.names.append(name)
            try:
                await asyncio.sleep(0)
            finally:
                self.inside -= 1


async def test_the_most_urgent_step_comes_first() -> None:
    log = Log()
    steps = [log.step("first", Urgency.REPEATED)]
    steps += [log.step(urgency.name, urgency) for urgency in reversed(Urgency)]
    await asyncio.gather(*steps)
    assert log.names == ["first", "RUNNING", "REQUEST", "UNPLANNED", "REPEATED"]


async def test_no_step_waits_for_ever() -> None:
    log = Log()
    task = asyncio.create_task(log.step("patient", Urgency.REPEATED))
    await asyncio.sleep(0)
    patient = asyncio.create_task(log.step("more patient", Urgency.REPEATED))

    async def press(number: int) -> None:
        for _ in range(20):
            await log.step(f"urgent {number}", Urgency.REQUEST)

    await asyncio.gather(press(0), press(1), task, patient)
    assert log.names.index("more patient") <= 5


@pytest.mark.parametrize("moment", range(6))
async def test_a_cancelled_step_passes_its_turn_on(moment: int) -> None:
    log = Log()
    steps = [asyncio.create_task(log.step(str(number))) for number in range(4)]
    for _ in range(moment):
        await asyncio.sleep(0)
    steps[1].cancel()
    steps[2].cancel()
    await asyncio.gather(*steps, return_exceptions=True)
    await log.step("last")
    assert log.names[-2:] == ["3", "last"]
