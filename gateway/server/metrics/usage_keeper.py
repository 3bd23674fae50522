"""Storage of usage counts: every two seconds, and at the end."""

from __future__ import annotations

import asyncio

from gateway.errors import StoreError
from gateway.keys import UsageRow
from gateway.logging import Logger
from gateway.proxy.metrics.usage_counter import UsageCounter
from gateway.store.usage_table import UsageTable
from gateway.supervision import SupervisedTask

log = Logger("fitserve.usage")

_KEEP_S = 2.0
# Seconds between two attempts while the disk is not writable.
_RETRY_S = 10.0


class UsageKeeper:
    """Runs in the process with the store; `counter` includes the counts of workers."""

    def __init__(self, counter: UsageCounter, table: UsageTable) -> None:
        self._counter = counter
        self._table = table
        self._is_failing = False
        self._lock = asyncio.Lock()
        self._keeping = SupervisedTask(self._store_usage, "storing usage")

    async def flush(self) -> bool:
        """Store all counts. Returns whether they are on the disk."""
        async with self._lock:
            rows = self._counter.drain()
            if not rows:
                return True
            writing = asyncio.create_task(asyncio.to_thread(self._table.add, rows))
            try:
                await asyncio.wait({writing})
            except asyncio.CancelledError:
                # The thread goes on, and stores the rows: they may not be counted twice.
                await asyncio.wait({writing})
                self._settle(writing, rows)
                raise
            return self._settle(writing, rows)

    def _settle(self, writing: asyncio.Task[None], rows: tuple[UsageRow, ...]) -> bool:
        """Take back rows that were not stored. Returns whether they are on the disk."""
        error = writing.exception()
        if error is None:
            self._is_failing = False
            return True
        self._counter.add(rows)
        if not isinstance(error, StoreError):
            raise error
        if not self._is_failing:
            log.warning("usage could not be stored; it is retried", error=str(error))
        self._is_failing = True
        return False

    async def close(self) -> None:
        await self._keeping.close()
        await self.flush()

    async def _store_usage(self) -> float:
        return _KEEP_S if await self.flush() else _RETRY_S
