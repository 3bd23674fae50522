"""Usage that is being written when its keeper ends is counted once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection
from pathlib import Path

import pytest

from gateway.errors import StoreError
from gateway.keys import UsageRow
from gateway.proxy.metrics.usage_counter import UsageCounter
from gateway.server.metrics.usage_keeper import UsageKeeper
from gateway.store.store import Store
from gateway.store.usage_table import UsageTable

pytestmark = pytest.mark.anyio


class SlowTable:
    """The usage of a real database, whose first write waits, and may be refused."""

    def __init__(self, table: UsageTable, *, is_refused: bool) -> None:
        self.table = table
        self.begin = threading.Event()
        self.go_on = threading.Event()
        self._is_refused = is_refused

    def add(self, rows: Collection[UsageRow]) -> None:
        is_first = not self.begin.is_set()
        self.begin.set()
        self.go_on.wait()
        if is_first and self._is_refused:
            raise StoreError("the disk is full", hint="")
        self.table.add(rows)


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_write_that_the_end_meets_counts_once(tmp_path: Path, is_refused: bool) -> None:
    store = Store(tmp_path / "fitserve.db")
    table = SlowTable(store.usage, is_refused=is_refused)
    counter = UsageCounter()
    keeper = UsageKeeper(counter, table)  # type: ignore[arg-type]
    counter.count("app", "m", 3, 4, None, None)
    await asyncio.to_thread(table.begin.wait)
    ending = asyncio.create_task(keeper.close())
    await asyncio.sleep(0)
    table.go_on.set()
    await ending
    (row,) = store.usage.sums(0, 10**6, ("key", "model"), key=None, model=None)
    assert (row.requests, row.prompt_tokens, row.completion_tokens) == (1, 3, 4)
    store.close()
