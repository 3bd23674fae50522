"""Waiting in tests: when a wait counts as hung, and a clock that stands.

No test measures how fast this machine is.
"""

from __future__ import annotations

import os
import time

# A guard for an idle machine, unrelated to any figure of the product.
HANG_S = 180.0
_CORES = len(os.sched_getaffinity(0))


def slowness() -> float:
    """How many times slower a program runs than on an idle machine, by the load; at least 1."""
    return max(1.0, os.getloadavg()[0] / _CORES)


def hang_s() -> float:
    """Seconds after which something that begins now counts as hung, on a machine this busy."""
    return HANG_S * slowness()


class Patience:
    """The time left for a wait that polls. It passes more slowly while the machine is busy."""

    def __init__(self, limit_s: float = HANG_S) -> None:
        self._left_s = limit_s
        self._looked = time.monotonic()

    def is_over(self) -> bool:
        now = time.monotonic()
        self._left_s -= (now - self._looked) / slowness()
        self._looked = now
        return self._left_s <= 0


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
