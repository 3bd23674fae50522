"""The answer that a client receives: the head written anew, the body passed on, and the end.

    the engine's answer            a client without a head yet    a client with the head of events
    an event stream                passed on                      passed on without a head
    an error in Anthropic's API    kept, then converted           kept, then sent as an event
    any other answer               passed on                      kept, then sent as an event

`Exchange` decides which engine is asked, and when the answer ends.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gateway.errors import FitserveError, UpstreamError
from gateway.proxy.access.rate_limits import Permit
from gateway.proxy.api.endpoints import Shape
from gateway.proxy.api.protocol import anthropic_error, dump, error_event, named_event
from gateway.proxy.heads import answer_head, whole_answer
from gateway.proxy.incoming_request import IncomingRequest
from gateway.proxy.meter import UNTOLD, TokenUsage, usage
from gateway.proxy.upstream_connection import Data, UpstreamConnection, Writer

_EVENT_END = (b"\n\n", b"\r\n\r\n", b"\r\r")
_BUFFERED_BYTES = 64 * 1024


class BufferedAnswer:
    """Keeps the body of an answer that needs another form: an error for Anthropic's API, or an
    answer without events for a client that was promised events."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: Data) -> None:
        if len(self.data) < _BUFFERED_BYTES:
            self.data += data

    def writelines(self, data: Iterable[Data]) -> None:
        for piece in data:
            self.write(piece)

    def event(self, shape: Shape, status: int) -> bytes:
        """The answer as an error event, on one line."""
        if shape == "anthropic" and status >= 400:
            return named_event(anthropic_error(status, self.data), shape)
        try:
            return named_event(dump(msgspec.json.decode(self.data)), shape)
        except (msgspec.DecodeError, RecursionError):
            return error_event(
                UpstreamError(
                    "The engine's answer is not an event stream.", hint="See the engine's log."
                ),
                shape,
            )


class AnsweredRequest(IncomingRequest):
    """The request and the state of its answer."""

    __slots__ = (
        *("_buffered", "_head_withheld", "_permit", "_usage", "client"),
        *("events", "sse_head_sent", "status"),
    )

    def _prepare_answer(self) -> None:
        self.client: Writer  # destination of the engine's answer
        self.status = 0
        self.events = False  # the answer is an event stream
        self.sse_head_sent = False  # the head of an event stream was sent while the request waited
        self._permit: Permit | None = None  # of a key with limits
        self._usage: TokenUsage | None = None
        self._buffered: BufferedAnswer | None = None
        # The head of the answer is held back, because the engine may report its own end.
        self._head_withheld = False

    @property
    def sent(self) -> int:
        """Bytes of the answer's body so far."""
        return self._upstream.sent if self._upstream is not None else 0

    @property
    def tail(self) -> tuple[bytes, ...]:
        """The last pieces of the answer's body."""
        return tuple(self._upstream.tail) if self._upstream is not None else ()

    @property
    def usage(self) -> TokenUsage:
        """The token usage that the answer reports."""
        if self._usage is None:
            upstream = self._upstream
            self._usage = (
                usage(upstream.tail)
                if upstream is not None and 200 <= self.status < 300
                else UNTOLD
            )
        return self._usage

    def _begin(self, upstream: UpstreamConnection) -> None:
        """Writes the head for the client before the body."""
        self._head_withheld = False
        if self.status >= 400 and self.endpoint.shape == "anthropic" and not self.sse_head_sent:
            self.client = self._buffered = BufferedAnswer()  # its form changes
            return
        head = answer_head(
            *(self.status, upstream.headers, upstream.length, self.own_headers(), self.id.encode()),
            accepts_chunked=self.accepts_chunked,
            keep_alive=self.keep_alive,
        )
        if not self.sse_head_sent:
            self.events, self.keep_alive, upstream.framed = (
                head.events,
                head.keep_alive,
                head.framed,
            )
            upstream.lead = head.data
        elif head.events:
            upstream.framed = (
                self.accepts_chunked
            )  # as announced in the head that was sent during the wait
        else:
            self.client = self._buffered = BufferedAnswer()

    def own_headers(self) -> bytes:
        """Header lines that the gateway itself adds to the answer."""
        plane = self.plane
        forwarded_headers = plane.date(self.connection.server_state.default_headers)
        if plane.origins is not None:
            forwarded_headers += plane.origins.lines(self.headers.get(b"origin"))
        return (
            forwarded_headers
            if self._permit is None
            else forwarded_headers + self._permit.lines(plane.loop.time())
        )

    def _complete_answer(self, upstream: UpstreamConnection) -> None:
        """Writes the end of a complete answer."""
        upstream.flush(b"0\r\n\r\n" if upstream.framed else b"")
        if self._buffered is not None and self.sse_head_sent:
            self._last_event(self._buffered.event(self.endpoint.shape, self.status))
        elif self._buffered is not None:
            self._write_error(self.status, self._buffered.data)

    def _write_error(self, status: int, body: bytes | bytearray) -> None:
        """Writes the engine's error in Anthropic's form."""
        forwarded_headers = b"content-type: application/json\r\n" + (
            b"" if self.keep_alive else b"connection: close\r\n"
        )
        converted = anthropic_error(status, body)
        self.connection.transport.write(
            whole_answer(status, forwarded_headers, self.own_headers(), self.id.encode(), converted)
        )

    def _end_with(self, error: FitserveError) -> None:
        """Ends an interrupted event stream with an error event."""
        event = error_event(error, self.endpoint.shape)
        if self._buffered is None and not b"".join((b"\n\n", *self.tail)).endswith(_EVENT_END):
            event = b"\n\n" + event
        self._last_event(event)

    def _last_event(self, event: bytes) -> None:
        self.connection.transport.write(
            b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event) if self.accepts_chunked else event
        )

    def _forget_answer(self) -> None:
        """Treats an interrupted answer that was not passed on as not started."""
        if self._head_withheld or (self._buffered is not None and not self.sse_head_sent):
            self.status, self._head_withheld = 0, False
