"""Connections to engines: opened on demand, reused, and dropped once their client leaves.

A connection is reused only after a complete answer with nothing after it, to a request that was
written in full. The engine should not close it while a request is being written. So reuse ends
after IDLE_S, which is below the keep-alive of the engines' servers (uvicorn: 5 s). Reuse lasts
longer if another connection stayed open longer. A request on a connection that closes all the same
is not sent again, because the engine may have read it.
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
# Parts of that time. A gateway that stood still for seconds loses one of them, and then sees the
# connection that its kernel made meanwhile.
_CONNECT_PARTS = 5
IDLE_S = 4.0
# Seconds that an idle connection is kept open, although it is reused for IDLE_S only. While it is
# open, other connections are reused that were idle for less time by _MARGIN_S. A crowd that left
# gives its descriptors back soon, and a new connection to an engine costs less than a millisecond.
SPARE_CONNECTION_LIFE_S = 20.0
_MARGIN_S = 1.0


class UpstreamPool:
    """The connections to one engine. `connections`: all open ones."""

    def __init__(self, url: str, loop: asyncio.AbstractEventLoop, idle_limit: int) -> None:
        url_parts = urlsplit(url)
        self.host = url_parts.hostname or ""
        self.port = url_parts.port or (443 if url_parts.scheme == "https" else 80)
        self.authority = url_parts.netloc.encode()
        self.prefix = url_parts.path.rstrip("/").encode()
        self._tls = ssl.create_default_context() if url_parts.scheme == "https" else None
        self._loop = loop
        self.connections: set[UpstreamConnection] = set()
        self._idle: list[UpstreamConnection] = []  # in the order of last use
        self._idle_limit = idle_limit
        self._good_s = IDLE_S  # how long an idle connection is known to stay open
        self._dials: set[asyncio.Task[None]] = set()

    def acquire(self) -> UpstreamConnection | None:
        """The idle connection that was used last, so that the others age."""
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

    def release(self, connection: UpstreamConnection) -> None:
        """Return a connection, after a complete answer to a request that was written in full.
        Beyond the limit the one that was idle longest is closed."""
        connection.exchange = None
        # The connection may be paused for a client that still receives the end of the answer.
        connection.transport.resume_reading()
        connection.idle_since = self._loop.time()
        self._idle.append(connection)
        if len(self._idle) > self._idle_limit:
            self._idle.pop(0).drop()

    def connect(self, exchange: Exchange) -> asyncio.Task[None]:
        """Connect, then call `exchange.send_request` or `exchange.unreachable`. Cancellation calls
        neither and leaves nothing open."""
        task = self._loop.create_task(self._dial(exchange))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)
        return task

    async def _dial(self, exchange: Exchange) -> None:
        connection = UpstreamConnection(self)
        is_connected = False
        try:
            await self._connect(connection)
            is_connected = True
        except (OSError, UnicodeError) as error:
            # TimeoutError and SSLError are OSErrors. A host name may be invalid.
            exchange.unreachable(error)
        else:
            exchange.send_request(connection)
        finally:
            if not is_connected:
                # uvloop closes a cancelled connection without a call of its protocol.
                self.connections.discard(connection)

    async def _connect(self, connection: UpstreamConnection) -> None:
        """Open the connection. Raises OSError, UnicodeError."""
        loop = self._loop
        timer: asyncio.TimerHandle

        def wait(parts: int) -> None:
            nonlocal timer
            if parts:
                timer = loop.call_later(CONNECT_TIMEOUT_S / _CONNECT_PARTS, wait, parts - 1)
            else:
                limit.reschedule(loop.time())

        async with asyncio.timeout(None) as limit:
            wait(_CONNECT_PARTS)
            try:
                await loop.create_connection(
                    lambda: connection, self.host, self.port, ssl=self._tls
                )
            finally:
                timer.cancel()

    def shorten_reuse(self) -> None:
        """Shorten reuse, because the engine closed an idle connection."""
        self._good_s = IDLE_S

    def sweep(self, time: float) -> bool:
        """Close connections that were idle for too long. Returns whether any connection
        remains."""
        self._idle = [
            connection for connection in self._idle if not connection.transport.is_closing()
        ]
        while self._idle and time - self._idle[0].idle_since >= SPARE_CONNECTION_LIFE_S:
            self._idle.pop(0).drop()
        if self._idle:
            self._good_s = max(self._good_s, time - self._idle[0].idle_since - _MARGIN_S)
        return bool(self.connections or self._dials)

    def close(self) -> None:
        for task in self._dials:
            task.cancel()
        for connection in list(self.connections):
            connection.drop()
