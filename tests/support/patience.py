"""Waiting in tests: how long until a thing counts as hung, and a clock that stands. No test tells
how fast this machine is."""

from __future__ import annotations

import time

# A guard, and no figure of the product's: a busy machine may take seconds for anything.
HANG_S = 180.0


class Clock:
    """Stands in for the module `time` of what it is given to: its monotonic clock moves only when a
    test sets `now`.

    `looks` counts how often it was asked, so that a test can wait until what it did not expect
    would have happened.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.looks = 0

    def monotonic(self) -> float:
        self.looks += 1
        return self.now

    def time(self) -> float:
        return time.time()
