"""Engines that left the routes: whether each has answered everything that it was asked, before it
    stops, sleeps, or gives way to another.

One way for all reasons: an engine has drained once no table of routes has it, every worker has said
so, and nothing is in flight there; or once it has had its time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

from gateway.proxy.routing.routes import Routes

# Between two looks at whether requests are in flight.
_LOOK_S = 0.1


def _never() -> bool:
    return False


class Drains:
    """most_s: the longest time that an engine gets, from when no table has it any more. What takes
    longer is cut off by its end."""

    def __init__(self, routes: Routes, most_s: float) -> None:
        self._routes = routes
        self._most_s = most_s
        self._since: dict[str, float] = {}

    def look(self, running: Collection[str]) -> None:
        """Forget the engines that run no more."""
        self._since = {name: since for name, since in self._since.items() if name in running}

    def over(self, instance: str) -> bool:
        """Whether nothing is in flight at an engine, and nothing will be; or nobody waits for that
        any longer."""
        if self._routes.drained(instance):
            return True
        if self._routes.holds(instance):
            self._since.pop(instance, None)
            return False
        now = time.monotonic()
        return now - self._since.setdefault(instance, now) >= self._most_s

    async def ended(self, instance: str, hurry: Callable[[], bool] = _never) -> None:
        """Until it is over. hurry: nobody waits for the requests any more."""
        while not (hurry() or self.over(instance)):  # noqa: ASYNC110 - other processes count the requests
            await asyncio.sleep(_LOOK_S)
