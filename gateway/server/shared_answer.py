"""An answer that requests share: rendered once for all that wait meanwhile, in a part of the
time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

# Seconds of rest for each second of rendering, so that inference has most of the event loop.
_REST_FACTOR = 4.0


class SharedAnswer:
    """The bytes of an answer, rendered after the request for it arrived.

    Requests that arrive before a rendering begins share it. A rendering that equals the one before
    gives the same object, so unread answers share its memory.
    """

    def __init__(self, render: Callable[[], Awaitable[bytes]]) -> None:
        self._render = render
        self._next: asyncio.Task[bytes] | None = None
        self._body = b""
        self._free_at = 0.0
        self._rendering = asyncio.Lock()

    async def body(self) -> bytes:
        """The answer as of now or later."""
        if self._next is None:
            self._next = asyncio.create_task(self._run())
        return await asyncio.shield(self._next)

    async def _run(self) -> bytes:
        async with self._rendering:
            await asyncio.sleep(max(0.0, self._free_at - time.monotonic()))
            self._next = None
            start_s = time.monotonic()
            try:
                body = await self._render()
            finally:
                end_s = time.monotonic()
                self._free_at = end_s + _REST_FACTOR * (end_s - start_s)
        if body != self._body:
            self._body = body
        return self._body
