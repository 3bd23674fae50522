"""A connection to an engine, and the answer read from it. `upstream_pool.py` manages the
connections."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import httptools

from gateway.proxy import head_cache
from gateway.proxy.bodies import thoughts
from gateway.proxy.heads import VALUE_BYTES

if TYPE_CHECKING:
    from gateway.proxy.exchange import Exchange
    from gateway.proxy.upstream_pool import UpstreamPool

# Bounds of an answer outside its body: consecutive bytes (a head, interim answers, chunk
# extensions, trailers), and header lines in all.
BARE_BYTES = 64 * 1024
HEADER_LINES = 128
# Interim answers, which have no body. The parser expects a body for other 1xx.
_INTERIM_STATUSES = frozenset({100, 102, 103})
# llhttp reads no body of these (RFC 9112, 6.3).
_BODILESS_STATUSES = (204, 304)
RECEIVE_BYTES = 128 * 1024
# The tail of an answer holds the usage block: of an event stream it is in one of the last events.
TAIL_BYTES = 4096
TAIL_PIECES = 4
CLIENT_HEADERS = frozenset(
    {b"content-type", b"content-encoding", b"content-disposition", b"cache-control", b"retry-after"}
)
# From this size on, two writes cost less than a copy.
_JOIN_BYTES = 16 * 1024
# A peer that vanished without a packet is detected within two minutes.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))


def watch_peer(connection: socket.socket) -> None:
    """Enable TCP keep-alive. Connections that a listening socket accepts inherit it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


Data = bytes | bytearray | memoryview


class Writer(Protocol):
    """Destination of an engine's answer: the client's transport, or a `BufferedAnswer`."""

    def write(self, data: Data, /) -> None: ...

    def writelines(self, data: Iterable[Data], /) -> None: ...


class UpstreamConnection(asyncio.Protocol):
    """A connection to an engine, and the answer being read from it: body bytes go straight to the
    client.

    exchange: the request being served; None while pooled and after a drop.
    is_active: bytes came since the last sweep.
    is_over: the answer is complete.
    headers: those that may be passed on.
    length: the content-length.
    is_sized: the engine says where its answer ends.
    is_framed: the client gets chunks.
    sent_bytes: body bytes so far.
    lead: the unsent head for the client.

    All bytes of one read go out in one call and one chunk, because a write costs more than all
    other work here. The exchange gets `handle_answer`, or `head`, then `first_byte` if there is
    a body, then `finish`. `handle_failure` may come at any time. After `handle_answer`, `finish` or
    `handle_failure` it gets nothing.
    """

    __slots__ = (
        "_bytes_after_body",
        "_is_behind_chunk",
        "_is_between_chunks",
        "_is_first",
        "_is_in_head",
        "_is_reusable",
        "_lines",
        "_parser",
        "_partial_name",
        "_previous_head",
        "_renames",
        "_unsent_pieces",
        "exchange",
        "headers",
        "idle_since",
        "is_active",
        "is_framed",
        "is_over",
        "is_sized",
        "lead",
        "length",
        "pool",
        "sent_bytes",
        "tail",
        "transport",
    )

    def __init__(self, pool: UpstreamPool) -> None:
        self.pool = pool
        self.transport: asyncio.Transport
        self.exchange: Exchange | None = None
        self.headers: tuple[tuple[bytes, bytes], ...] = ()
        self.length: bytes | None = None
        self.tail: deque[bytes] = deque(maxlen=TAIL_PIECES)
        self.lead = b""
        self.idle_since = 0.0
        self._previous_head: head_cache.KnownAnswerHead | None = None  # head of the previous answer
        self._parser = httptools.HttpResponseParser(self)
        self._unsent_pieces: list[bytes] = []  # parts of the body from the current read
        self._bytes_after_body = 0  # bytes since the last byte of the body
        self._lines = 0  # number of header lines
        self._is_in_head = self._is_reusable = False
        self._is_first = False  # nothing of the answer has come yet
        self._is_behind_chunk = False  # the parser is after a chunk
        self._renames = False  # thoughts get another name
        self._partial_name = b""  # the last bytes of a read, which may begin the name of thoughts
        # Chunks pass through unchanged, and the next byte begins a chunk.
        self._is_between_chunks = False

    def send(
        self, exchange: Exchange, head: bytes, body: bytes | bytearray, *, renames: bool = False
    ) -> None:
        """Write a request, whose answer goes to `exchange`. `renames`: thoughts of the answer get
        their usual name."""
        self.exchange = exchange
        self.tail.clear()
        self.lead = b""
        self.sent_bytes = self._bytes_after_body = self._lines = 0
        self.is_over = self.is_sized = self.is_framed = False
        self._is_between_chunks = self._is_behind_chunk = False
        self._is_first = self.is_active = True
        self._partial_name = b""
        self._renames = renames
        if len(body) < _JOIN_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    def flush(self, last: bytes = b"") -> None:
        """Write the pending bytes for the client and `last` in one system call."""
        exchange = self.exchange
        lead = self.lead
        body = b"".join(self._unsent_pieces)
        self.lead = b""
        self._unsent_pieces.clear()
        if body:
            self.tail.append(body[-TAIL_BYTES:])
            if self.is_framed:
                lead += b"%x\r\n" % len(body)
                last = b"\r\n" + last
        if exchange is None:
            return
        if len(body) < _JOIN_BYTES:
            if data := lead + body + last:
                exchange.answer.writer.write(data)
        else:
            exchange.answer.writer.writelines((lead, body, last))

    def last_pieces(self) -> list[bytes]:
        """The last pieces of the body, with the bytes that are not yet written."""
        return [*self.tail, *(piece[-TAIL_BYTES:] for piece in self._unsent_pieces)]

    def drop(self) -> None:
        """Close immediately, and drop unsent bytes."""
        self.exchange = None
        self.transport.abort()

    # --- called by the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.pool.connections.add(self)
        # uvloop's socket object creates a real socket for each call.
        connection = socket.socket(fileno=transport.get_extra_info("socket").fileno())
        try:
            watch_peer(connection)
            # Otherwise the kernel would take megabytes from the engine for a slow client
            # (`limits.limit_send_buffer`).
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        finally:
            connection.detach()

    def data_received(self, data: bytes) -> None:
        """Pass on bytes of the engine, without parsing where head or chunk are known."""
        exchange = self.exchange
        if exchange is None:
            self.transport.abort()  # the engine sends bytes without a request
            return
        self.is_active = True
        if self._renames:
            data, self._partial_name = thoughts.rename_thoughts(self._partial_name + data)
        if self._is_between_chunks and self._is_chunk(data):
            exchange.answer.writer.write(data)
            return
        is_first = self._is_first
        if is_first:
            self._is_first = False
            known_head = self._previous_head
            if (
                known_head is not None
                and exchange.keep_alive
                and not exchange.answer.has_sent_sse_head
                and (body := known_head.body(data)) is not None
            ):
                self.is_over = True
                exchange.handle_answer(self, known_head.status, known_head.forwarded_headers, body)
                return
        self._parse(exchange, data, is_first=is_first)

    def _parse(self, exchange: Exchange, data: bytes, *, is_first: bool) -> None:
        """Read bytes of an answer, and write the part of its body to the client.

        is_first: whether they begin the answer.
        """
        sent_bytes = self.sent_bytes
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self.exchange is not None and not self.is_over:
                exchange.handle_failure(
                    self, f"its answer is not HTTP: {error.__context__ or error!r}"
                )
                return
            self._is_reusable = False
        if self.exchange is None:
            return
        self._is_between_chunks = (
            self._is_behind_chunk and self.is_framed and data.endswith(b"\r\n")
        )
        if self.is_over:
            if is_first and self._is_reusable:
                self._previous_head = head_cache.remember_answer(
                    data, exchange.answer.status, self.headers, self.length, self.sent_bytes
                )
            exchange.finish(self, is_reusable=self._is_reusable)
            return
        if self._unsent_pieces or self.lead:
            self.flush()
        if self.sent_bytes != sent_bytes:
            self._bytes_after_body = 0
            return
        self._bytes_after_body += len(data)
        if self._bytes_after_body > BARE_BYTES:
            exchange.handle_failure(self, "it sends too many bytes outside the body of its answer")

    def _is_chunk(self, data: bytes) -> bool:
        """Whether `data` is exactly one plainly framed chunk. If so, it needs no parsing and no new
        frame."""
        line_end = data.find(b"\r\n", 1, 8)
        size = len(data) - line_end - 4
        if size <= 0 or not data.startswith(b"%x\r\n" % size) or not data.endswith(b"\r\n"):
            return False
        self.sent_bytes += size
        self.tail.append(data[max(line_end + 2, len(data) - TAIL_BYTES) : -2])
        return True

    def eof_received(self) -> None:
        if self.exchange is None:
            self.pool.shorten_reuse()
        self._handle_close(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.pool.connections.discard(self)
        if self.exchange is None and exc is not None:
            self.pool.shorten_reuse()
        self._handle_close(exc)

    def _handle_close(self, error: Exception | None) -> None:
        exchange = self.exchange
        if exchange is None:
            return
        if exchange.answer.status and not self.is_sized and error is None:
            exchange.finish(self, is_reusable=False)
        else:
            exchange.handle_failure(
                self,
                f"the connection closed: {error!r}" if error else "the connection closed",
                is_closed=True,
            )

    def pause_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.pause_upload()

    def resume_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.resume_upload()

    # --- called by the parser ---

    def on_message_begin(self) -> None:
        self._is_reusable = False  # only one answer may come
        if self.is_over:
            raise ValueError("a second answer follows")
        self.headers = ()
        self.length = None
        self.is_sized = False
        self._is_in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self._lines += 1
        if self._lines > HEADER_LINES:
            raise ValueError("too many headers")
        if not self._is_in_head:
            return  # a trailer, which is not used
        name = name.lower()
        if name in CLIENT_HEADERS and len(value) <= VALUE_BYTES:
            self.headers += ((name, value),)
        elif name == b"content-length":
            self.length = value
            self.is_sized = True
        elif name == b"transfer-encoding":
            self.is_sized = True

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        status = self._parser.get_status_code()
        if self.exchange is not None and status not in _INTERIM_STATUSES:
            self.exchange.head(self, status)

    def on_chunk_header(self) -> None:
        self._is_behind_chunk = False

    def on_chunk_complete(self) -> None:
        self._is_behind_chunk = True

    def on_body(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None or self.is_over:
            return
        if not self.sent_bytes:
            exchange.first_byte(data)
        self.sent_bytes += len(data)
        self._unsent_pieces.append(data)

    def on_message_complete(self) -> None:
        status = self.exchange.answer.status if self.exchange is not None else 0
        if status and not self.is_over:
            self.is_over = True
            # Such an answer has no body. Where it states one, that may come after it.
            is_followed = status in _BODILESS_STATUSES and self.is_sized and self.length != b"0"
            self._is_reusable = not is_followed and self._parser.should_keep_alive()
