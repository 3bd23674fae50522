"""Waiting in tests: when a wait counts as hung, and a clock that stands.

No test measures how fast this machine is.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A guard for an idle machine, unrelated to any figure of the product.
HANG_S = 180.0
# A look at a gateway costs 4 ms of processor time: 50 a second are a fifth of a core.
_LOOKS = 20
_LONGEST_PAUSE_S = 0.5
_CORES = len(os.sched_getaffinity(0))


def slowness_of(load: str, cores: int) -> float:
    """How many times slower a program runs than on an idle machine; at least 1. load: the text of
    /proc/loadavg.

    The load of the last minute says nothing of programs that have just begun to compute, so those
    that want a core now count too.
    """
    last_minute, _, _, running, *_ = load.split()
    return max(1.0, float(last_minute) / cores, int(running.partition("/")[0]) / cores)


def slowness() -> float:
    """How many times slower a program runs than on an idle machine, by the load."""
    return slowness_of(Path("/proc/loadavg").read_text(), _CORES)


def hang_s() -> float:
    """Seconds after which something that begins now counts as hung, on a machine this busy."""
    return HANG_S * slowness()


class Patience:
    """The time left for a wait that polls. It passes more slowly while the machine is busy."""

    def __init__(self, limit_s: float = HANG_S) -> None:
        self._left_s = limit_s
        self._began = self._looked = time.monotonic()

    def is_over(self) -> bool:
        now = time.monotonic()
        self._left_s -= (now - self._looked) / slowness()
        self._looked = now
        return self._left_s <= 0

    def pause_s(self, least_s: float) -> float:
        """Seconds until the next look: a twentieth of the wait so far, half a second at most."""
        waited_s = time.monotonic() - self._began
        return max(least_s, min(_LONGEST_PAUSE_S, waited_s / _LOOKS))


async def wait_until(state: str, look: Callable[[], Any], least_s: float = 0.02) -> Any:
    """The first truthy answer of `look`, which may be a coroutine function. Raises AssertionError.
    least_s: seconds between two looks, which become rarer."""
    patience = Patience()
    while not patience.is_over():
        answer = look()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return answer
        await asyncio.sleep(patience.pause_s(least_s))
    raise AssertionError(f"{state}: not within {HANG_S:.0f} s")


class Clock:
    """Replaces the module `time` of a module under test: its monotonic clock moves only when a
    test sets `now`.

    `looks` counts the readings, so that a test can wait until an unexpected step would have been
    taken.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.looks = 0

    def monotonic(self) -> float:
        self.looks += 1
        return self.now

    def time(self) -> float:
        return time.time()
