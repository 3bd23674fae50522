"""Requests read from a client: parsing, limits, and handing pieces of bodies to their requests.

Each head becomes an `Exchange` or an `AsgiRequest`. `ClientConnection` decides whose turn it is;
`limits.py` has the limits.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import httptools

from gateway.errors import FitserveError
from gateway.proxy import limits, refusals
from gateway.proxy.access import priority
from gateway.proxy.access.auth import Key
from gateway.proxy.api import endpoints
from gateway.proxy.api.endpoints import Shape
from gateway.proxy.api.protocol import (
    file_too_large_error,
    known_id,
    new_id,
    too_large_error,
)
from gateway.proxy.asgi_request import AsgiRequest
from gateway.proxy.exchange import Exchange
from gateway.proxy.heads import RequestHead, find_upgrade, head_without_upgrade, request_lines

if TYPE_CHECKING:
    from gateway.proxy.client_connection import ClientConnection

log = logging.getLogger(__name__)

# Bytes of an upload besides its file: fields, and heads of parts.
_FORM_BYTES = 64 * 1024


def admit(connection: ClientConnection, headers: dict[bytes, bytes]) -> Key:
    """The caller with these headers (`limits.read_head`), with the scope of inference. A key in
    `x-api-key` becomes that of `authorization`. Raises the errors of `Keys.authenticate`.

    The client's address is that of the connection's last head.
    """
    if b"x-api-key" in headers and b"authorization" not in headers:
        headers[b"authorization"] = b"Bearer " + headers[b"x-api-key"]
    return connection.plane.keys.authenticate(headers, "inference", connection.client_address)


class RequestReader:
    """Reads one connection.

    incoming: the request being read.
    is_in_head, is_in_body: part of its head or body has arrived.
    remaining_bytes: the rest of a long body with an announced length; else 0.
    """

    __slots__ = (
        "_connection",
        "_ignores_upgrade",
        "_length",
        "_parser",
        "_pieces",
        "_received_bytes",
        "_size",
        "_trailer_count",
        "_wire",
        "headers",
        "incoming",
        "is_in_body",
        "is_in_head",
        "remaining_bytes",
        "url",
    )

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._parser = self._new_parser()
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.incoming: Exchange | AsgiRequest | None = None
        self.is_in_head = self.is_in_body = False
        self._size = 0  # bytes of the current head or body so far
        self._length = self.remaining_bytes = 0  # the announced length of the current body
        self._trailer_count = 0  # trailers of the current request
        self._pieces: list[bytes] = []  # parts of the body from the current read
        # Bytes of reads that contain only body, including heads of chunks and trailers. -1: no such
        # read yet.
        self._wire = 0
        # Bytes of this read, and of earlier reads with the same head. While discarding: all bytes.
        self._received_bytes = 0
        self._ignores_upgrade = False

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # `connection: close` in a request does not stop the reading of data after it.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    @property
    def method(self) -> bytes:
        """The method of the last request."""
        return self._parser.get_method()

    def close(self) -> None:
        """End all reading."""
        self.incoming = None
        self._parser = None  # type: ignore[assignment]  # refers to this reader

    def read(self, data: bytes | memoryview) -> bool:
        """Parse `data`. Returns whether all of it was complete requests."""
        was_in_head = self.is_in_head
        self._received_bytes = len(data) + (self._received_bytes if was_in_head else 0)
        if not self._parse(data):
            return False
        if self.is_in_head:
            connection = self._connection
            if not was_in_head:
                self._size = 0
                connection.deadline = connection.plane.loop.time() + limits.HEAD_S
            self._size += len(data) if was_in_head else 0
            if self._size > limits.HEAD_BYTES:
                connection.refuse_and_close(limits.head_too_large_error())
            return False
        if self.is_in_body:
            self._count_body(len(data))
            return False
        return True

    def discard(self, count: int) -> None:
        """Count the bytes of a refused client. The announced length is read, so that the client
        comes to read its refusal, and little more."""
        self._received_bytes += count
        announced = next(
            (
                int(value)
                for name, value in self.headers
                if name == b"content-length" and value.isdigit()
            ),
            0,
        )
        transport = self._connection.transport
        if self._received_bytes > announced + limits.DISCARDED_BYTES and transport.is_reading():
            transport.pause_reading()  # until its deadline

    def _count_body(self, count: int) -> None:
        """Count a read of `count` bytes that ended within a body."""
        connection = self._connection
        first = self._wire < 0
        if not connection.is_reading_paused:
            latest = connection.plane.loop.time() + limits.BODY_S
            connection.deadline = (
                latest if first else min(connection.deadline + count / limits.MIN_BYTES_S, latest)
            )
        self._wire = 0 if first else self._wire + count
        if self._wire > limits.max_wire_bytes(self._size):
            connection.refuse_and_close(limits.framing_too_large_error())
            connection.transport.pause_reading()  # no ordinary client goes on after this
        elif self.incoming is not None:
            connection.continue_request(self.incoming)

    def _parse(self, data: bytes | memoryview) -> bool:
        """Feed the parser. Returns whether the next bytes are for it too."""
        connection = self._connection
        try:
            self._parser.feed_data(data)
            if self._pieces:
                self._hand_over_body()
        except MemoryError:
            connection.refuse_and_close(refusals.memory_error())
        except httptools.HttpParserUpgrade as upgrade:
            if self._ignores_upgrade:
                self._read_again(data[upgrade.args[0] :])
            return False
        except httptools.HttpParserError as error:
            log.debug("bytes that are not HTTP: %r", error)
            # The bytes before the error may have been refused already.
            if connection.is_discarding:
                pass
            elif isinstance(error.__context__, MemoryError):
                connection.refuse_and_close(refusals.memory_error())
            else:
                connection.refuse_and_close(refusals.protocol_error())
        return not connection.is_discarding

    def _read_again(self, tail: bytes | memoryview) -> None:
        """Read a request for another protocol as one without that wish; Java's HTTP client asks
        for h2c. The parser has not read the body."""
        head = head_without_upgrade(
            self.method, self.url, self._parser.get_http_version(), self.headers
        )
        self._parser = self._new_parser()
        self.read(head + tail)

    # --- called by the parser ---

    def on_message_begin(self) -> None:
        self._check_refusal()
        self.url = b""
        self.headers = []
        self.is_in_head = True

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_in_head:
            # The parser leaves white space after a value (RFC 9112, 5.1: no part of it).
            self.headers.append((name.lower(), value.rstrip(b" \t")))
            if len(self.headers) > limits.HEADER_LINES:
                self._refuse_lines()
        else:  # a trailer, which is not used
            self._trailer_count += 1
            if self._trailer_count > limits.HEADER_LINES:
                self._refuse_lines()

    def _check_refusal(self) -> None:
        """End the parsing of bytes after a refusal. Raises ValueError, which the parser passes
        on."""
        if self._connection.is_discarding:
            raise ValueError("the request is refused")

    def _refuse_lines(self) -> None:
        """Refuse a request with too many header lines or trailers. Raises ValueError."""
        self._check_refusal()
        self._connection.refuse_and_close(
            limits.header_lines_error() if self.is_in_head else limits.framing_too_large_error()
        )
        self._check_refusal()

    def _start_body(self) -> None:
        """Note that the head has ended."""
        self.is_in_head = False
        self.is_in_body = True
        self._size = self._length = self.remaining_bytes = self._trailer_count = 0
        self._wire = -1
        self.incoming = None

    def on_headers_complete(self) -> None:
        """Begin the request of a complete head, or refuse the head."""
        connection = self._connection
        if connection.is_discarding:
            return
        self._start_body()
        method = self._parser.get_method()
        upgrades = self._parser.should_upgrade() and method != b"CONNECT"
        upgrade = find_upgrade(self.headers) if upgrades else None
        self._ignores_upgrade = upgrade is not None and upgrade != b"websocket"
        if self._ignores_upgrade:
            return
        endpoint = endpoints.USUAL_ENDPOINTS.get((method, self.url))
        shape: Shape = "openai" if endpoint is None else endpoint.shape
        id_ = None
        request: Exchange | AsgiRequest
        connection.client_address = connection.plane.proxies.client_address(
            self.headers, connection.address
        )
        try:
            if upgrade is not None:
                raise refusals.websocket_error()
            if connection.pipelined_count >= limits.MAX_PIPELINED_REQUESTS:
                raise refusals.pipeline_error()
            version = self._parser.get_http_version()
            headers = limits.read_head(self.url, self.headers, version, self._received_bytes)
            id_ = known_id(headers.get(b"x-request-id")) or new_id()
            plane = connection.plane
            self._length = int(headers.get(b"content-length", b"0"))
            if self._length > limits.READ_BYTES:
                self.remaining_bytes = self._length
            if self._length > plane.limits.body_bytes:
                self._check_size(self._length)
            keep_alive = (
                version == "1.1" and self._parser.should_keep_alive() and not plane.is_draining
            )
            if endpoint is None:
                path, query = endpoints.split_target(self.url)
                if endpoints.is_inference(path) and not self._is_preflight(method):
                    shape = endpoints.shape_of(path)
                    key = admit(connection, headers)
                    if not endpoints.is_of_batches(path):
                        endpoint = endpoints.find(path, query, method.decode())
            else:
                key = admit(connection, headers)
            if endpoint is None:
                request = AsgiRequest(
                    connection, method, self.url, version, self.headers, id_, keep_alive=keep_alive
                )
                request.is_file = self._is_file()
            else:
                head = self._request_head(endpoint, headers, key)
                request = Exchange(connection, head, id_, keep_alive=keep_alive)
                request.answer.accepts_chunked = version != "1.0"
        except FitserveError as error:
            connection.refuse_and_close(error, shape, id_)
            return
        self.incoming = request
        connection.add_request(request)

    def _request_head(
        self, endpoint: endpoints.Endpoint, headers: dict[bytes, bytes], key: Key
    ) -> RequestHead:
        """The meaning of the head of a request for an engine."""
        return RequestHead(
            endpoint,
            headers,
            key,
            request_lines(headers),
            priority=priority.request_priority(headers.get(priority.HEADER), key),
            address=self._connection.client_address,
        )

    def _is_preflight(self, method: bytes) -> bool:
        """Whether a browser asks for the permissions of a page. Preflights have no key, and the
        application answers them for all paths."""
        has_method = any(name == b"access-control-request-method" for name, _ in self.headers)
        return method == b"OPTIONS" and self._connection.plane.origins is not None and has_method

    def _is_file(self) -> bool:
        """Whether the body is an upload, which goes to the disk as it comes."""
        return self.method == b"POST" and self.url.partition(b"?")[0] == endpoints.FILES_TARGET

    def _check_size(self, size: int) -> None:
        """Check a body beyond the limit of bodies, which may be a file. Raises TooLarge."""
        limits_in_force = self._connection.plane.limits
        if not self._is_file():
            raise too_large_error(limits_in_force.body_bytes)
        if size > limits_in_force.file_bytes + _FORM_BYTES:
            raise file_too_large_error(limits_in_force.file_bytes)

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)

    def _hand_over_body(self) -> None:
        """Give the request the parts of its body from the current read, in one piece: a client
        may send single bytes."""
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        connection = self._connection
        request = self.incoming
        if connection.is_discarding or request is None:
            return
        self._size += len(data)
        if self._length > limits.READ_BYTES:
            self.remaining_bytes = self._length - self._size
        try:
            if self._size > connection.plane.limits.body_bytes:
                self._check_size(self._size)
            request.upload.more(data)
        except FitserveError as error:
            connection.refuse_and_close(error, request.shape, request.id)

    def on_message_complete(self) -> None:
        if self._pieces:
            self._hand_over_body()
        if self._connection.is_discarding or self._ignores_upgrade:
            return
        self.is_in_body = False
        self.remaining_bytes = 0
        request = self.incoming
        self.incoming = None
        self._connection.request_complete(request)
