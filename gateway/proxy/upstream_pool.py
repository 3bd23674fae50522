"""Connections to engines: made when needed, kept for the next request, dropped the moment their
client leaves.

A connection is reused only when its last answer was complete, nothing came after it, and the whole
request had been written. An engine should not close it in the moment we write to it. So it is not
reused after IDLE_S, which is below the keep-alive of the engines' servers (uvicorn: 5 s), but where
the engine has left another one open for longer. Where it happens all the same, the request is not
sent again: whether the engine has read it cannot be known.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gateway.proxy.upstream_connection import UpstreamConnection

if TYPE_CHECKING:
    from gateway.proxy.exchange import Exchange

CONNECT_TIMEOUT_S = 5.0
IDLE_S = 4.0
# An idle connection stays open for so long, although it is not reused after IDLE_S: it shows
# whether the engine closes it. While it stays open, another connection is reused that has been idle
# for less time, by this margin.
KEPT_S = 60.0
_MARGIN_S = 1.0


class UpstreamPool:
    """The connections to one engine. `connections`: all that are open."""

    def __init__(self, url: str, loop: asyncio.AbstractEventLoop) -> None:
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.authority = parts.netloc.encode()
        self.prefix = parts.path.rstrip("/").encode()
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._loop = loop
        self.connections: set[UpstreamConnection] = set()
        self._idle: list[UpstreamConnection] = []  # in the order of their last use
        self._good_s = IDLE_S  # how long an idle connection is known to stay good
        self._dials: set[asyncio.Task[None]] = set()

    def take(self) -> UpstreamConnection | None:
        """An idle connection: the connection that was used last, so that the others grow old."""
        idle = self._idle
        while idle:
            connection = idle.pop()
            if connection.transport.is_closing():
                continue
            if self._loop.time() - connection.idle_since < self._good_s:
                return connection
            idle.append(connection)
            break
        return None

    def give(self, connection: UpstreamConnection) -> None:
        """Back to the pool. Only after a complete answer to a request that was written in whole."""
        connection.exchange = None
        # It may have been paused for the client of this answer, who has yet to take the last of it.
        connection.transport.resume_reading()
        connection.idle_since = self._loop.time()
        self._idle.append(connection)

    def dial(self, exchange: Exchange) -> asyncio.Task[None]:
        """Connects, then calls `exchange.connected` or `exchange.unreachable`. Cancelled, it calls
        neither and leaves nothing open."""
        task = self._loop.create_task(self._dial(exchange))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)
        return task

    async def _dial(self, exchange: Exchange) -> None:
        connection = UpstreamConnection(self)
        made = False
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._loop.create_connection(
                    lambda: connection, self.host, self.port, ssl=self._tls
                )
            made = True
        except (
            OSError,
            UnicodeError,
        ) as error:  # TimeoutError and SSLError are OSErrors; a host name may not be one
            exchange.unreachable(error)
        else:
            exchange.connected(connection)
        finally:
            if not made:
                self.connections.discard(
                    connection
                )  # uvloop closes a cancelled connection without a word to its protocol

    def distrust(self) -> None:
        """The engine has closed an idle connection."""
        self._good_s = IDLE_S

    def sweep(self, now: float) -> bool:
        """Closes connections that were idle for too long. Whether any connection is left."""
        self._idle = [
            connection for connection in self._idle if not connection.transport.is_closing()
        ]
        while self._idle and now - self._idle[0].idle_since >= KEPT_S:
            self._idle.pop(0).drop()
        if self._idle:
            self._good_s = max(self._good_s, now - self._idle[0].idle_since - _MARGIN_S)
        return bool(self.connections or self._dials)

    def close(self) -> None:
        for task in self._dials:
            task.cancel()
        for connection in list(self.connections):
            connection.drop()
