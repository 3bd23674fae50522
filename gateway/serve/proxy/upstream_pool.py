"""Connections to engines: made when needed, kept for the next request, dropped the moment their client leaves.

A connection is reused only when its last answer was complete, nothing came after it, and the whole request had been written. An engine
should not close it in the moment we write to it. So it is not reused after IDLE_S, which is below the keep-alive of the engines' servers
(uvicorn: 5 s), but where the engine has left another one open for longer. Should it happen all the same, the request is not sent again:
whether the engine read it cannot be known.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gateway.serve.proxy.upstream_connection import Link

if TYPE_CHECKING:
    from gateway.serve.proxy.exchange import Exchange

CONNECT_TIMEOUT_S = 5.0
IDLE_S = 4.0
# How long one is kept all the same, to see whether the engine closes it; and by how much it must have been idle for longer than
# another one that is reused then.
KEPT_S = 60.0
_MARGIN_S = 1.0


class Pool:
    """The connections to one engine. `links`: all that are open."""

    def __init__(self, url: str, loop: asyncio.AbstractEventLoop) -> None:
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.authority = parts.netloc.encode()
        self.prefix = parts.path.rstrip("/").encode()
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._loop = loop
        self.links: set[Link] = set()
        self._idle: list[Link] = []  # those used last at the end
        self._good_s = IDLE_S  # for which one is good that is idle
        self._dials: set[asyncio.Task[None]] = set()

    def take(self) -> Link | None:
        """A connection that waits for work; the one used last, so that the others may grow old."""
        idle = self._idle
        while idle:
            link = idle.pop()
            if link.transport.is_closing():
                continue
            if self._loop.time() - link.idle_since < self._good_s:
                return link
            idle.append(link)
            break
        return None

    def give(self, link: Link) -> None:
        """Back to the pool. Only after a complete answer to a request that was written in whole."""
        link.exchange = None
        link.idle_since = self._loop.time()
        self._idle.append(link)

    def dial(self, exchange: Exchange) -> asyncio.Task[None]:
        """Connects, then calls `exchange.connected` or `exchange.unreachable`. Cancelled, it calls neither and leaves nothing open."""
        task = self._loop.create_task(self._dial(exchange))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)
        return task

    async def _dial(self, exchange: Exchange) -> None:
        link = Link(self)
        made = False
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._loop.create_connection(lambda: link, self.host, self.port, ssl=self._tls)
            made = True
        except (OSError, UnicodeError) as error:  # TimeoutError and SSLError are OSErrors; a host name may not be one
            exchange.unreachable(error)
        else:
            exchange.connected(link)
        finally:
            if not made:
                self.links.discard(link)  # uvloop closes a cancelled connection without a word to its protocol

    def distrust(self) -> None:
        """The engine has closed one that was idle."""
        self._good_s = IDLE_S

    def sweep(self, now: float) -> bool:
        """Closes what has waited too long. Whether anything is left."""
        self._idle = [link for link in self._idle if not link.transport.is_closing()]
        while self._idle and now - self._idle[0].idle_since >= KEPT_S:
            self._idle.pop(0).drop()
        if self._idle:
            self._good_s = max(self._good_s, now - self._idle[0].idle_since - _MARGIN_S)
        return bool(self.links or self._dials)

    def close(self) -> None:
        for task in self._dials:
            task.cancel()
        for link in list(self.links):
            link.drop()
