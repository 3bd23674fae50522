"""A reading of all machines, shared by the calls that wait for the end of another one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedReading(Generic[T]):
    """Gives each call a reading that began after the call, and as few readings as that needs.

    The calls of many starts cost two readings of all machines then, and not one each.
    """

    def __init__(self, read: Callable[[], Awaitable[T]]) -> None:
        self._read = read
        self._lock = asyncio.Lock()
        self.count = 0
        """Readings that have begun."""
        self._last_result: tuple[T] | None = None
        """None: the last reading failed, or there was none."""

    async def result(self) -> T:
        """The result of a reading. Raises its errors."""
        former_count = self.count
        async with self._lock:
            if self.count == former_count or self._last_result is None:
                self.count = self.count + 1
                self._last_result = None
                self._last_result = (await self._read(),)
            return self._last_result[0]
