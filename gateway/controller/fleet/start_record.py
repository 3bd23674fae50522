"""The record of this machine's starts, and the expected time of the next."""

from __future__ import annotations

import asyncio

from gateway.diagnosis.start_times import expected_start, measured_start
from gateway.diagnosis.starts_elsewhere import start_elsewhere
from gateway.domain import Attempt, Plan, StartConditions, StartTime
from gateway.store.start_table import MAX_STARTS
from gateway.store.store import Store


class StartRecord:
    """Records measured starts, and expects the time of the next. Each gateway has one object of
    this class."""

    def __init__(self, store: Store) -> None:
        """Read the kept starts. Raises StoreError."""
        self._table = store.starts
        self._starts = store.starts.rows()

    async def add(self, attempt: Attempt, conditions: StartConditions) -> None:
        """Note a start with measured phases. Raises StoreError."""
        start = measured_start(attempt, conditions)
        self._starts = [*self._starts, start][-MAX_STARTS:]
        await asyncio.to_thread(self._table.add, start)

    def expected_time(self, plan: Plan, conditions: StartConditions) -> StartTime | None:
        """The expected time of a start, by starts on this machine or another; None: unknown."""
        local_start = expected_start(plan, conditions, self._starts)
        return local_start or start_elsewhere(plan, conditions)
