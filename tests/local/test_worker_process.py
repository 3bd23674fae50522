"""A program that is ended tells how it ended, also when others want the processor."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import pytest

from gateway.worker_process import kill

pytestmark = pytest.mark.anyio


async def test_who_is_killed_ended_by_that_kill() -> None:
    over, codes = threading.Event(), Counter[int]()

    def busy() -> None:
        while not over.is_set():
            sum(range(1000))

    others = [threading.Thread(target=busy) for _ in range(2)]
    for other in others:
        other.start()
    try:
        for _ in range(40):
            child = await asyncio.create_subprocess_exec(
                "sleep", "1000", stdin=-1, stdout=-1, start_new_session=True
            )
            codes[await kill(child)] += 1
    finally:
        over.set()
        for other in others:
            other.join()
    assert codes == {-9: 40}
