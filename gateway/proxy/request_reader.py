"""What a client sends, as requests: the bytes go to the parser, each head becomes an `Exchange` or
an `AsgiRequest`, and each piece of a body
goes to its request, all within the limits of `limits.py`. Whose turn it is to be answered:
`ClientConnection`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import httptools

from gateway.errors import FitserveError
from gateway.proxy import limits, refusals
from gateway.proxy.access.auth import Key
from gateway.proxy.api import endpoints
from gateway.proxy.api.endpoints import Shape
from gateway.proxy.api.protocol import known_id, new_id, too_large
from gateway.proxy.asgi_request import AsgiRequest
from gateway.proxy.exchange import Exchange
from gateway.proxy.heads import head_without_upgrade, request_lines, upgrade_of

if TYPE_CHECKING:
    from gateway.proxy.client_connection import ClientConnection

log = logging.getLogger(__name__)


class RequestReader:
    """Reads one connection. `incoming`: the request that is being read; `in_head`, `in_body`: of
    which a part has come."""

    __slots__ = (
        *("_connection", "_ignores_upgrade", "_parser", "_received", "_size", "_wire"),
        *("headers", "in_body", "in_head", "incoming", "url"),
    )

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._parser = self._new_parser()
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.incoming: Exchange | AsgiRequest | None = None
        self.in_head = self.in_body = False
        self._size = 0  # bytes so far of the head or body that comes in
        # bytes of the reads that bring the body alone, with its chunks' heads and trailers; -1:
        # none was yet
        self._wire = 0
        # bytes of this read, and of the reads before that the head came in; of all that is
        # discarded
        self._received = 0
        self._ignores_upgrade = False

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # An answer with `connection: close` does not end the reading of what came with its request.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    @property
    def method(self) -> bytes:
        """Of the last request."""
        return self._parser.get_method()

    def close(self) -> None:
        """Nothing is read any more."""
        self.incoming = None
        self._parser = None  # type: ignore[assignment]  # it holds this reader

    def read(self, data: bytes | memoryview) -> bool:
        """Whether all of `data` was requests that are whole now."""
        was_in_head = self.in_head
        self._received = len(data) + (self._received if was_in_head else 0)
        if not self._parse(data):
            return False
        if self.in_head:
            connection = self._connection
            if not was_in_head:
                self._size = 0
                connection.deadline = connection.plane.loop.time() + limits.HEAD_S
            self._size += len(data) if was_in_head else 0
            if self._size > limits.HEAD_BYTES:
                connection.hang_up(limits.head_too_large())
            return False
        if self.in_body:
            self._body_received(len(data))
            return False
        return True

    def throw_away(self, count: int) -> None:
        """A refused client sends on: as much as it announced is read, so that it comes to read its
        refusal, and little more."""
        self._received += count
        announced = next(
            (
                int(value)
                for name, value in self.headers
                if name == b"content-length" and value.isdigit()
            ),
            0,
        )
        transport = self._connection.transport
        if self._received > announced + limits.DISCARDED_BYTES and transport.is_reading():
            transport.pause_reading()  # until its time is over

    def _body_received(self, count: int) -> None:
        """A read of `count` bytes ended within a body."""
        connection, first = self._connection, self._wire < 0
        if not connection.unread:
            latest = connection.plane.loop.time() + limits.BODY_S
            connection.deadline = (
                latest if first else min(connection.deadline + count / limits.LEAST_BYTES_S, latest)
            )
        self._wire = 0 if first else self._wire + count
        if self._wire > limits.most_on_the_wire(self._size):
            connection.hang_up(limits.framing_too_large())
            connection.transport.pause_reading()  # no honest client goes on like this
        elif self.incoming is not None:
            connection.read_on(self.incoming)

    def _parse(self, data: bytes | memoryview) -> bool:
        """Whether what comes next is still for this parser."""
        connection = self._connection
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._ignores_upgrade:
                self._read_again(data[upgrade.args[0] :])
            return False
        except httptools.HttpParserError as error:
            log.debug("not HTTP: %r", error)
            if (
                connection.discarding
            ):  # the same bytes may have been refused already, for what came before the garbage
                pass
            elif isinstance(error.__context__, MemoryError):
                connection.hang_up(refusals.no_memory())
            else:
                connection.hang_up(refusals.not_http())
        return not connection.discarding

    def _read_again(self, rest: bytes | memoryview) -> None:
        """The request asked for a protocol that is not spoken here, as Java's HTTP client does
        (h2c). It is read as if it had not;
        the parser has left the body alone."""
        head = head_without_upgrade(
            self.method, self.url, self._parser.get_http_version(), self.headers
        )
        self._parser = self._new_parser()
        self.read(head + rest)

    # --- what the parser calls ---

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.in_head = True

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_head:  # else a trailer, which nobody here reads
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        connection = self._connection
        if connection.discarding:
            return
        self.in_head = False
        self.in_body = True
        self._size, self._wire = 0, -1
        self.incoming = None
        method = self._parser.get_method()
        upgrade = (
            upgrade_of(self.headers)
            if self._parser.should_upgrade() and method != b"CONNECT"
            else None
        )
        self._ignores_upgrade = upgrade is not None and upgrade != b"websocket"
        if self._ignores_upgrade:
            return
        endpoint = endpoints.USUAL.get((method, self.url))
        shape: Shape = "openai" if endpoint is None else endpoint.shape
        id_ = None
        request: Exchange | AsgiRequest
        try:
            if upgrade is not None:
                raise refusals.no_websockets()
            if connection.ahead >= limits.PIPELINED:
                raise refusals.too_many_ahead()
            version = self._parser.get_http_version()
            found = limits.read_head(self.url, self.headers, version, self._received)
            id_ = known_id(found.get(b"x-request-id")) or new_id()
            plane = connection.plane
            if int(found.get(b"content-length", b"0")) > plane.limits.body_bytes:
                raise too_large(plane.limits.body_bytes)
            keep = version == "1.1" and self._parser.should_keep_alive() and not plane.leaving
            if endpoint is None:
                path, query = endpoints.split(self.url)
                if endpoints.is_inference(path) and not self._preflight(method):
                    shape = endpoints.shape_of(path)
                    key = self._admit(found)
                    endpoint = endpoints.find(path, query, method.decode())
            else:
                key = self._admit(found)
            if endpoint is None:
                expects = found.get(b"expect", b"").lower() == b"100-continue"
                request = AsgiRequest(
                    connection,
                    method,
                    self.url,
                    version,
                    self.headers,
                    id_,
                    expects=expects,
                    keep=keep,
                )
            else:
                lines = request_lines(found)
                request = Exchange(
                    plane, connection, endpoint, found, key, id_, keep, version != "1.0", lines
                )
        except FitserveError as error:
            connection.hang_up(error, shape, id_)
            return
        self.incoming = request
        connection.arrived(request)

    def _preflight(self, method: bytes) -> bool:
        """Whether a browser asks what a page may do. It sends no key with that, and the application
        answers for all paths."""
        asks = any(name == b"access-control-request-method" for name, _ in self.headers)
        return method == b"OPTIONS" and self._connection.plane.origins is not None and asks

    def _admit(self, found: dict[bytes, bytes]) -> Key:
        if b"x-api-key" in found and b"authorization" not in found:
            found[b"authorization"] = b"Bearer " + found[b"x-api-key"]
        return self._connection.plane.keys.who(found, "inference", self._connection.address)

    def on_body(self, data: bytes) -> None:
        connection, request = self._connection, self.incoming
        if connection.discarding or request is None:
            return
        self._size += len(data)
        try:
            if self._size > connection.plane.limits.body_bytes:
                raise too_large(connection.plane.limits.body_bytes)
            request.more(data)
        except FitserveError as error:
            connection.hang_up(error, request.shape, request.id)

    def on_message_complete(self) -> None:
        if self._connection.discarding or self._ignores_upgrade:
            return
        self.in_body = False
        request, self.incoming = self.incoming, None
        self._connection.completed(request)
