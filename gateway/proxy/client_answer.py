"""The answer that a client receives: the rewritten head, the body passed on, and the end.

    the engine's answer            a client without a head yet    a client with the head of events
    an event stream                passed on                      passed on without a head
    an error                       kept, then converted           kept, then sent as an event
    any other answer               passed on                      kept, then sent as an event

`Exchange` decides which engine is asked, and when the answer ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from gateway.decoding import DECODE_ERRORS
from gateway.errors import FitserveError, UpstreamError
from gateway.proxy.access.rate_limits import Permit
from gateway.proxy.api.endpoints import Endpoint
from gateway.proxy.api.engine_errors import engine_error
from gateway.proxy.api.protocol import dump, error_event, named_event
from gateway.proxy.heads import (
    RequestHead,
    answer_head,
    client_lines,
    waiting_head,
    whole_answer,
)
from gateway.proxy.upstream_connection import Data, UpstreamConnection, Writer

if TYPE_CHECKING:
    from gateway.proxy.client_connection import ClientConnection

_EVENT_END = (b"\n\n", b"\r\n\r\n", b"\r\r")
_BUFFERED_BYTES = 64 * 1024


class BufferedAnswer:
    """Keeps the body of an answer that needs another form: an error, or an answer without events
    for a client that was promised events."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: Data) -> None:
        if len(self.data) < _BUFFERED_BYTES:
            self.data += data

    def writelines(self, data: Iterable[Data]) -> None:
        for piece in data:
            self.write(piece)

    def event(self, endpoint: Endpoint, status: int) -> bytes:
        """The answer as an error event, on one line."""
        shape = endpoint.shape
        if status >= 400:
            return named_event(engine_error(status, self.data, endpoint), shape)
        try:
            return named_event(dump(msgspec.json.decode(self.data)), shape)
        except DECODE_ERRORS:
            return error_event(
                UpstreamError(
                    "The engine's answer is not an event stream.",
                    hint="Send it again. The operator finds the cause in the engine's log.",
                ),
                shape,
            )


class ClientAnswer:
    """The answer to one request.

    id: the id of the request.
    writer: destination of the engine's answer.
    status: 0 before its head.
    accepts_chunked: the client understands chunked encoding.
    has_events: the answer is an event stream.
    has_sent_sse_head: its head was sent while the request waited.
    withholds_head: the head is held back, because the engine may report its own end.
    permit: the permit of a key with limits.
    refused_body: the body of the request that the engine refuses, as far as it is kept.
    """

    __slots__ = (
        "_buffered",
        "_connection",
        "_request",
        "accepts_chunked",
        "has_events",
        "has_sent_sse_head",
        "id",
        "permit",
        "refused_body",
        "status",
        "withholds_head",
        "writer",
    )

    def __init__(self, connection: ClientConnection, request: RequestHead, id_: bytes) -> None:
        self._connection = connection
        self._request = request
        self._buffered: BufferedAnswer | None = None
        self.id = id_
        self.writer: Writer = connection.transport
        self.status = 0
        self.accepts_chunked = True
        self.has_events = False
        self.has_sent_sse_head = False
        self.withholds_head = False
        self.permit: Permit | None = None
        self.refused_body: bytes | bytearray = b""

    @property
    def has_started(self) -> bool:
        """Whether the client has a part of the answer, or the engine's status for it."""
        return bool(self.status) or self.has_sent_sse_head

    @property
    def streams_events(self) -> bool:
        """Whether the engine's events are passed on."""
        return self.has_events and self._buffered is None

    def start(self, upstream: UpstreamConnection, *, keep_alive: bool) -> bool:
        """Write the head for the client before the body. `keep_alive` without this answer, and the
        result with it: whether the connection may serve another request."""
        self.withholds_head = False
        if self.status >= 400 and not self.has_sent_sse_head:
            self.writer = self._buffered = BufferedAnswer()  # its form changes
            return keep_alive
        head = answer_head(
            self.status,
            upstream.headers,
            upstream.length,
            self.own_headers(),
            self.id,
            accepts_chunked=self.accepts_chunked,
            keep_alive=keep_alive,
        )
        if not self.has_sent_sse_head:
            self.has_events = head.has_events
            upstream.is_framed = head.is_framed
            upstream.lead = head.data
            return head.keep_alive
        if head.has_events:
            # The head that was sent during the wait announced this framing.
            upstream.is_framed = self.accepts_chunked
        else:
            self.writer = self._buffered = BufferedAnswer()
        return keep_alive

    def write_comment(self, comment: bytes, *, keep_alive: bool) -> bool:
        """Write a comment of an event stream to a waiting client, after the head. `keep_alive` as
        for `begin`."""
        if not self.has_sent_sse_head:
            head = waiting_head(
                self.own_headers(),
                self.id,
                accepts_chunked=self.accepts_chunked,
                keep_alive=keep_alive,
            )
            self.has_sent_sse_head = self.has_events = True
            keep_alive = head.keep_alive
            self.writer.write(head.data)
        self.writer.write(
            b"%x\r\n%b\r\n" % (len(comment), comment) if self.accepts_chunked else comment
        )
        return keep_alive

    def complete(self, upstream: UpstreamConnection, *, keep_alive: bool) -> None:
        """Write the end of a complete answer."""
        upstream.flush(b"0\r\n\r\n" if upstream.is_framed else b"")
        if self._buffered is None:
            return
        if self.has_sent_sse_head:
            self._last_event(self._buffered.event(self._request.endpoint, self.status))
        else:
            forwarded_headers, _ = client_lines(upstream.headers)
            self.write_error(self._buffered.data, forwarded_headers, keep_alive=keep_alive)

    def break_off(self, error: FitserveError, tail: Iterable[bytes]) -> None:
        """End an interrupted event stream with an error event. `tail`: the last pieces sent."""
        if not self.has_events:
            return
        event = error_event(error, self._request.endpoint.shape)
        if self._buffered is None and not b"".join((b"\n\n", *tail)).endswith(_EVENT_END):
            event = b"\n\n" + event
        self._last_event(event)

    def forget(self) -> None:
        """Treat an interrupted answer that was not passed on as not started."""
        if self.withholds_head or (self._buffered is not None and not self.has_sent_sse_head):
            self.status = 0
            self.withholds_head = False

    def restart(self) -> None:
        """Prepares for the answer of another replica. A sent head stays."""
        self.forget()
        self.has_sent_sse_head = self.has_sent_sse_head or bool(self.status)
        self.status = 0
        self.writer = self._connection.transport
        self._buffered = None

    def own_headers(self) -> bytes:
        """Header lines that the gateway itself adds to the answer."""
        plane = self._connection.plane
        lines = plane.date(self._connection.server_state.default_headers)
        if plane.origins is not None:
            lines += plane.origins.lines(self._request.headers.get(b"origin"))
        return lines if self.permit is None else lines + self.permit.lines(plane.loop.time())

    def write_error(
        self, body: bytes | bytearray, forwarded_headers: bytes, *, keep_alive: bool
    ) -> None:
        """Write the engine's error in the form of the client's API."""
        lines = [
            line
            for line in forwarded_headers.splitlines(keepends=True)
            if not line.startswith(b"content-")
        ]
        lines.append(b"content-type: application/json\r\n")
        if not keep_alive:
            lines.append(b"connection: close\r\n")
        converted = engine_error(self.status, body, self._request.endpoint, self.refused_body)
        self._connection.transport.write(
            whole_answer(self.status, b"".join(lines), self.own_headers(), self.id, converted)
        )

    def _last_event(self, event: bytes) -> None:
        self._connection.transport.write(
            b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event) if self.accepts_chunked else event
        )
