"""The rest between two starts of a program."""

from __future__ import annotations

import asyncio

_FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 5.0


class RestartPause:
    """A rest that doubles with each start in a row that failed, up to MAX_PAUSE_S."""

    def __init__(self) -> None:
        self._next_s = _FIRST_PAUSE_S

    async def wait(self, *, was_well: bool) -> None:
        """Wait before the next start. was_well: the last one did its work."""
        rest_s = _FIRST_PAUSE_S if was_well else self._next_s
        self._next_s = min(2 * rest_s, MAX_PAUSE_S)
        await asyncio.sleep(rest_s)
