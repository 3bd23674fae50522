"""Draining of engines that left the routes, before they stop, sleep or make room.

An engine has drained once no route table has it, every worker has confirmed that, and it has no
request in flight. After `most_s` an engine counts as drained in any case.

"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

from gateway.proxy.routing.routes import Routes

# Seconds between two checks for requests in flight.
_CHECK_S = 0.1


def _never_urgent() -> bool:
    return False


class Drains:
    """Waits until engines outside the routes have answered their requests.

    `most_s`: seconds that an engine gets after no route table has it. The end of this time
    interrupts longer requests.
    """

    def __init__(self, routes: Routes, most_s: float) -> None:
        self._routes = routes
        self._most_s = most_s
        self._drained_since: dict[str, float] = {}

    def forget_engines(self, running_names: Collection[str]) -> None:
        """Forget engines that no longer run."""
        self._drained_since = {
            name: start for name, start in self._drained_since.items() if name in running_names
        }

    def is_drained(self, instance: str) -> bool:
        """Whether no request is or will be in flight at an engine, or its time is over."""
        if self._routes.has_drained(instance):
            return True
        if self._routes.holds(instance):
            self._drained_since.pop(instance, None)
            return False
        now = time.monotonic()
        return now - self._drained_since.setdefault(instance, now) >= self._most_s

    async def wait_until_drained(
        self, instance: str, hurry: Callable[[], bool] = _never_urgent
    ) -> None:
        """Return once the engine has drained. `hurry`: returns True to stop the wait."""
        while not (hurry() or self.is_drained(instance)):  # noqa: ASYNC110
            await asyncio.sleep(_CHECK_S)
