"""Turns to plan: one at a time, the most urgent first, and nobody is passed over for ever."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

# One in this many turns goes to the step that has waited longest.
_FAIR_TURN_INTERVAL = 4


class Urgency(enum.IntEnum):
    """How urgent a turn is, the most urgent first.

    RUNNING: an engine gives or takes memory.
    REQUEST: a request waits for the model.
    UNPLANNED: it was never planned, or its engine has ended.
    REPEATED: its last plan found nothing.
    """

    RUNNING = 0
    REQUEST = 1
    UNPLANNED = 2
    REPEATED = 3


@dataclass
class _Waiter:
    number: int
    urgency: Callable[[], Urgency]
    beginning: asyncio.Future[None] = field(default_factory=asyncio.Future)


class PlanTurns:
    """A lock whose waiters come by urgency, which may change while they wait."""

    def __init__(self) -> None:
        self._arrivals = itertools.count()
        self._turns = itertools.count(1)
        self._is_taken = False
        self._waiters: list[_Waiter] = []

    @contextlib.asynccontextmanager
    async def turn(
        self, urgency: Callable[[], Urgency] = lambda: Urgency.RUNNING
    ) -> AsyncGenerator[None]:
        """Hold the only turn in this context."""
        if self._is_taken:
            await self._wait_for_turn(_Waiter(next(self._arrivals), urgency))
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait_for_turn(self, waiter: _Waiter) -> None:
        self._waiters.append(waiter)
        try:
            await waiter.beginning
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif waiter.beginning.done() and not waiter.beginning.cancelled():
                self._pass_on()  # the turn had come already
            raise

    def _pass_on(self) -> None:
        """Give the turn to the next waiter. The turn stays taken, so that no newcomer comes
        between."""
        waiters = [waiter for waiter in self._waiters if not waiter.beginning.done()]
        self._is_taken = bool(waiters)
        if not waiters:
            return
        waiter = (
            waiters[0]
            if next(self._turns) % _FAIR_TURN_INTERVAL == 0
            else min(waiters, key=lambda waiter: (waiter.urgency(), waiter.number))
        )
        self._waiters.remove(waiter)
        waiter.beginning.set_result(None)
