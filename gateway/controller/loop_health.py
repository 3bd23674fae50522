"""The problems of the loop, and the time of its last pass."""

from __future__ import annotations

import time

from gateway.supervision import ErrorBackoff


class LoopHealth:
    """Written only by the loop."""

    def __init__(self) -> None:
        self.host_problem: str | None = None
        self.store_problem: str | None = None
        self.setback = ErrorBackoff("the control loop")
        self.last_pass = time.monotonic()
        """Monotonic time of the last pass."""

    @property
    def problem(self) -> str | None:
        """The unexpected error that breaks passes now."""
        return self.setback.problem

    @property
    def problems(self) -> list[str]:
        return [
            problem for problem in (self.problem, self.host_problem, self.store_problem) if problem
        ]
