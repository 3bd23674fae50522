"""Connections to engines: made when needed, kept for the next request, dropped the moment their client leaves.

A connection is reused only when its last answer was complete, nothing came after it, and the whole request had been written. An engine
should not close it in the moment we write to it. So it is not reused after IDLE_S, which is below the keep-alive of the engines' servers
(uvicorn: 5 s), but where the engine has left another one open for longer. Should it happen all the same, the request is not sent again:
whether the engine read it cannot be known.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httptools

from gateway.serve import repeats
from gateway.serve.meter import TAIL_BYTES, TAIL_PIECES

if TYPE_CHECKING:
    from gateway.serve.exchange import Exchange

CONNECT_TIMEOUT_S = 5.0
IDLE_S = 4.0
# How long one is kept all the same, to see whether the engine closes it; and by how much it must have been idle for longer than
# another one that is reused then.
KEPT_S = 60.0
_MARGIN_S = 1.0
HEAD_LIMIT_BYTES = 64 * 1024
RECEIVE_BYTES = 128 * 1024
TO_CLIENT = frozenset({b"content-type", b"content-encoding", b"content-disposition", b"cache-control", b"retry-after"})
# From here on two writes cost less than a copy.
_JOIN_BYTES = 16 * 1024
# A vanished peer, of which no packet tells, is noticed within two minutes.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))


def watch_peer(connection: socket.socket) -> None:
    """Has the kernel ask a silent peer whether it is still there. What a socket accepts that listens is watched as it is itself."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Link(asyncio.Protocol):
    """One connection to an engine, and the answer that is being read from it: body bytes go straight to the client.

    `exchange` is the request it works for, None while it waits in the pool and after it was dropped. `heard`: the engine said
    something since the last sweep. `over`: the answer is complete. `headers`: those that may be passed on; `length`: its
    content-length. `sized`: the engine says where its answer ends. `framed`: the client gets it in chunks. `sent`: body bytes so far.
    `out`: what one read gave for the client, written at once, for a write costs more than all that is done here.
    """

    __slots__ = (
        *("_between", "_bulky", "_chunk_ended", "_echo", "_first", "_head_bytes", "_parser", "_reusable", "exchange", "framed"),
        *("headers", "heard", "idle_since", "length", "out", "over", "pool", "sent", "sized", "tail", "transport"),
    )

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.transport: asyncio.Transport
        self.exchange: Exchange | None = None
        self.headers: tuple[tuple[bytes, bytes], ...] = ()
        self.length: bytes | None = None
        self.tail: deque[bytes] = deque(maxlen=TAIL_PIECES)
        self.out: list[bytes] = []
        self.idle_since = 0.0
        self._echo: repeats.Echo | None = None  # the head of the answer before
        self._parser = httptools.HttpResponseParser(self)
        # What a header may hold is checked where it is passed on; one odd header is no reason to refuse a whole answer.
        self._parser.set_dangerous_leniencies(lenient_headers=True)
        self._reusable = self._bulky = False
        self._first = False  # nothing of the answer has come yet
        self._chunk_ended = False  # what was last parsed is the end of a chunk
        self._between = False  # the answer goes out in chunks as it comes in, and what comes next begins one

    def ask(self, exchange: Exchange, head: bytes, body: bytes | bytearray) -> None:
        """Writes a request; its answer goes to `exchange`."""
        self.exchange = exchange
        self.tail.clear()
        self.sent = self._head_bytes = 0
        self.over = self.sized = self.framed = self._between = self._chunk_ended = False
        self._first = self.heard = True
        if len(body) < _JOIN_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    def flush(self) -> None:
        """Writes `out` to the client, in one system call."""
        out = self.out
        if self.exchange is not None:
            if len(out) == 1:
                self.exchange.client.write(out[0])
            else:
                self.exchange.client.writelines(out) if self._bulky else self.exchange.client.write(b"".join(out))
        out.clear()

    def drop(self) -> None:
        """Closes at once: what is not sent yet is not sent."""
        self.exchange = None
        self.transport.abort()

    # --- the transport's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.pool.links.add(self)
        # What uvloop gives as the socket makes a real one for every call.
        connection = socket.socket(fileno=transport.get_extra_info("socket").fileno())
        try:
            watch_peer(connection)
            # For a client that reads slowly the kernel would else take megabytes from the engine (`guard.hold_little`).
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        finally:
            connection.detach()

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:
            self.transport.abort()  # it talks unasked
            return
        self.heard = True
        if self._between and self._is_chunk(data):
            exchange.client.write(data)
            return
        self._bulky = len(data) >= _JOIN_BYTES
        first = self._first
        if first:
            self._first = False
            echo = self._echo
            if echo is not None and exchange.keep and not exchange.promised and (body := echo.body(data)) is not None:
                self.over = True
                exchange.answered(self, echo.status, echo.lines, body)
                return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.over:
                exchange.broke(self, f"it does not speak HTTP: {error!r}")
                return
            self._reusable = False
        if self.exchange is None:
            return
        self._between = self._chunk_ended and self.framed and data.endswith(b"\r\n")
        if self.over:
            if first and self._reusable:
                self._echo = repeats.remember_answer(data, exchange.status, self.headers, self.length)
            exchange.end(self, reusable=self._reusable)
        elif self.out:
            self.flush()
        elif not exchange.status:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_LIMIT_BYTES:
                exchange.broke(self, "the head of its answer has no end")

    def _is_chunk(self, data: bytes) -> bool:
        """Whether that is one chunk, written as plainly as they are written here: it needs neither be parsed nor framed anew."""
        at = data.find(b"\r\n", 1, 8)
        size = len(data) - at - 4
        if size <= 0 or not data.startswith(b"%x\r\n" % size) or not data.endswith(b"\r\n"):
            return False
        self.sent += size
        self.tail.append(data[max(at + 2, len(data) - TAIL_BYTES) : -2])
        return True

    def eof_received(self) -> None:
        if self.exchange is None:
            self.pool.distrust()
        self._closed(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.pool.links.discard(self)
        if self.exchange is None and exc is not None:
            self.pool.distrust()
        self._closed(exc)

    def _closed(self, error: Exception | None) -> None:
        exchange = self.exchange
        if exchange is None:
            return
        if exchange.status and not self.sized and error is None:
            exchange.end(self, reusable=False)
        else:
            exchange.broke(self, f"the connection closed: {error!r}" if error else "the connection closed")

    def pause_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.front.pause_upload()

    def resume_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.front.uploaded(self.exchange, 0)

    # --- the parser's side ---

    def on_message_begin(self) -> None:
        self.headers = ()
        self.length = None
        self._reusable = False  # nothing may follow an answer

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in TO_CLIENT:
            self.headers += ((name, value),)
        elif name == b"content-length":
            self.length = value
            self.sized = True
        elif name == b"transfer-encoding":
            self.sized = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.exchange is not None and not self.over and (status >= 200 or status == 101):
            self.exchange.head(self, status)

    def on_chunk_header(self) -> None:
        self._chunk_ended = False

    def on_chunk_complete(self) -> None:
        self._chunk_ended = True

    def on_body(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None or self.over:
            return
        if not self.sent:
            exchange.first_byte(data)
        size = len(data)
        self.sent += size
        self.tail.append(data if size <= TAIL_BYTES else data[-TAIL_BYTES:])
        if not self.framed:
            self.out.append(data)
        elif size < _JOIN_BYTES:
            self.out.append(b"%x\r\n%b\r\n" % (size, data))
        else:
            self.out += (b"%x\r\n" % size, data, b"\r\n")

    def on_message_complete(self) -> None:
        if self.exchange is not None and self.exchange.status and not self.over:
            self.over = True
            self._reusable = self._parser.should_keep_alive()


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
