"""Turns of batches that read lines ahead: bounded in all and by key, in order of creation."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

# Each batch with a turn has a mebibyte of lines in memory, or one line of 32 MiB.
MAX_TURNS = 16
# One key leaves turns to others, as its lines may wait long for its own limits.
MAX_TURNS_OF_KEY = 4


@dataclass(eq=False, slots=True)
class _Applicant:
    """A batch that waits. wake: event of a turn that may be free."""

    made_at: float
    owner: str
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class ReadingTurns:
    """Turns that change hands in one event loop. The oldest batch that may have one is next."""

    def __init__(self) -> None:
        self._owners: Counter[str] = Counter()
        self._applicants: list[_Applicant] = []

    @asynccontextmanager
    async def turn(self, owner: str, made_at: float) -> AsyncIterator[None]:
        """Hold a turn, as soon as there is one for a batch of that age."""
        await self._wait(_Applicant(made_at, owner))
        self._owners[owner] += 1
        self._notify_all()
        try:
            yield
        finally:
            self._owners[owner] -= 1
            if not self._owners[owner]:
                del self._owners[owner]
            self._notify_all()

    async def _wait(self, applicant: _Applicant) -> None:
        self._applicants.append(applicant)
        self._applicants.sort(key=lambda waiter: waiter.made_at)
        try:
            while self._next_applicant() is not applicant:
                applicant.wake.clear()
                await applicant.wake.wait()
        finally:
            self._applicants.remove(applicant)
            self._notify_all()

    def _next_applicant(self) -> _Applicant | None:
        """The applicant that may have a turn now; None: none may."""
        if self._owners.total() >= MAX_TURNS:
            return None
        return next(
            (
                applicant
                for applicant in self._applicants
                if self._owners[applicant.owner] < MAX_TURNS_OF_KEY
            ),
            None,
        )

    def _notify_all(self) -> None:
        for applicant in self._applicants:
            applicant.wake.set()
