"""What the client hears of its request: the head of the engine's answer, written anew, and what
ends the answer. The bytes between pass from
the engine's connection to `client` as they come.

    the engine's answer                   to a client that waits in silence        to one that was promised an event stream
    an event stream                       as it comes                              as it comes, without a head
    an error, where Anthropic was asked   kept, and written in Anthropic's shape   kept, and told as an event
    anything else                         as it comes                              kept, and told as an event

Who decides which engine is asked, and when it ends: `Exchange`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

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
    """Keeps the body of an answer: an error that a client of Anthropic's reads in another shape, or
    what is no event stream, for a client
    that was promised an event stream."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: Data) -> None:
        if len(self.data) < _BUFFERED_BYTES:
            self.data += data

    def writelines(self, data: Iterable[Data]) -> None:
        for piece in data:
            self.write(piece)

    def event(self, shape: Shape, status: int) -> bytes:
        """The answer as the event of an error, on one line."""
        if shape == "anthropic" and status >= 400:
            return named_event(anthropic_error(status, self.data), shape)
        try:
            return named_event(dump(msgspec.json.decode(self.data)), shape)
        except (msgspec.DecodeError, RecursionError):
            return error_event(
                UpstreamError("The engine's answer is no stream.", hint="Its log may say why."),
                shape,
            )


@dataclass(slots=True, eq=False)
class AnsweredRequest(IncomingRequest):
    """The request, and what is written of its answer."""

    client: Writer = field(init=False)  # where the engine's answer is written
    status: int = 0
    events: bool = False  # the answer is an event stream
    promised: bool = False  # the head of one was written while the request waited
    _permit: Permit | None = None  # of a key with limits
    _usage: TokenUsage | None = None
    _buffered: BufferedAnswer | None = None
    # the head of an answer has come and is not passed on: the engine may be saying that it dies
    _doubted: bool = False

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
        """As the answer told it."""
        if self._usage is None:
            upstream = self._upstream
            self._usage = (
                usage(upstream.tail)
                if upstream is not None and 200 <= self.status < 300
                else UNTOLD
            )
        return self._usage

    def _begin(self, upstream: UpstreamConnection) -> None:
        """The head for the client, which the answer follows."""
        self._doubted = False
        if self.status >= 400 and self.endpoint.shape == "anthropic" and not self.promised:
            self.client = self._buffered = BufferedAnswer()  # its shape is another one
            return
        head = answer_head(
            *(self.status, upstream.headers, upstream.length, self.own_headers(), self.id.encode()),
            chunks=self.chunks,
            keep=self.keep,
        )
        if not self.promised:
            self.events, self.keep, upstream.framed = head.events, head.keep, head.framed
            upstream.lead = head.data
        elif head.events:
            upstream.framed = self.chunks  # as the head says that was sent while the request waited
        else:
            self.client = self._buffered = BufferedAnswer()

    def own_headers(self) -> bytes:
        """The lines of the answer's head that are the gateway's own."""
        plane = self.plane
        own = plane.date(self.connection.server_state.default_headers)
        if plane.origins is not None:
            own += plane.origins.lines(self.found.get(b"origin"))
        return own if self._permit is None else own + self._permit.lines(plane.loop.time())

    def _complete_answer(self, upstream: UpstreamConnection) -> None:
        """The engine has said all of it."""
        upstream.flush(b"0\r\n\r\n" if upstream.framed else b"")
        if self._buffered is not None and self.promised:
            self._last_event(self._buffered.event(self.endpoint.shape, self.status))
        elif self._buffered is not None:
            self._write_error(self.status, self._buffered.data)

    def _write_error(self, status: int, body: bytes | bytearray) -> None:
        """The engine's error, in the shape that Anthropic's clients read."""
        lines = b"content-type: application/json\r\n" + (
            b"" if self.keep else b"connection: close\r\n"
        )
        told = anthropic_error(status, body)
        self.connection.transport.write(
            whole_answer(status, lines, self.own_headers(), self.id.encode(), told)
        )

    def _end_with(self, error: FitserveError) -> None:
        """An event stream breaks off: the error is its last event."""
        event = error_event(error, self.endpoint.shape)
        if self._buffered is None and not b"".join((b"\n\n", *self.tail)).endswith(_EVENT_END):
            event = b"\n\n" + event
        self._last_event(event)

    def _last_event(self, event: bytes) -> None:
        self.connection.transport.write(
            b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event) if self.chunks else event
        )

    def _take_back(self) -> None:
        """An answer that was not passed on yet, and breaks off, has not started."""
        if self._doubted or (self._buffered is not None and not self.promised):
            self.status, self._doubted = 0, False
