"""What keeps the loop from its work, and when it last looked at the world."""

from __future__ import annotations

import time

from gateway.supervision import Setback


class LoopHealth:
    """Written by the loop alone."""

    def __init__(self) -> None:
        self.host_problem: str | None = None
        self.store_problem: str | None = None
        self.setback = Setback("the control loop")
        self.last_pass = time.monotonic()
        """Of the monotonic clock."""

    @property
    def problem(self) -> str | None:
        """What keeps passes from being whole, that nobody expected."""
        return self.setback.problem

    @property
    def problems(self) -> list[str]:
        return [one for one in (self.problem, self.host_problem, self.store_problem) if one]
