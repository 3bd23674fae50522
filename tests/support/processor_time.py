"""Processor time of a process, and the time that it waited for a processor."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple


class ProcessorTime(NamedTuple):
    """Seconds of all threads of a process, from the kernel's scheduler.

    used_s: time on a processor.
    waited_s: time of being ready to run, while other threads had the processors.
    turns: number of times that a thread came to a processor.
    """

    used_s: float
    waited_s: float
    turns: int

    @classmethod
    def read(cls, pid: int) -> ProcessorTime:
        """The time since the start of the process, without threads that have ended."""
        used_ns = waited_ns = turns = 0
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has ended
                numbers = [int(text) for text in (task / "schedstat").read_text().split()]
                used_ns += numbers[0]
                waited_ns += numbers[1]
                turns += numbers[2]
        return cls(used_ns / 1e9, waited_ns / 1e9, turns)

    def minus(self, start: ProcessorTime) -> ProcessorTime:
        return ProcessorTime(
            self.used_s - start.used_s,
            self.waited_s - start.waited_s,
            self.turns - start.turns,
        )

    def describe(self, seconds: float) -> str:
        """The share of a processor during so many seconds, and the mean wait for one."""
        wait_ms = 1000 * self.waited_s / max(1, self.turns)
        return f"{self.used_s / seconds:.0%} of a core, each turn after {wait_ms:.2f} ms"
