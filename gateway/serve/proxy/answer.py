"""What becomes of a request: the answer of an engine on its way to the client, or the error that it ends with.

`Exchange` is how the request gets to an engine; the states of both are told there.
"""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from gateway.access import rate_limits as limits
from gateway.access.auth import Key
from gateway.api.endpoints import Endpoint
from gateway.api.protocol import error_event
from gateway.errors import FitserveError, UpstreamError
from gateway.routing.routes import Call, Replica
from gateway.serve.proxy.heads import answer_head, whole_answer
from gateway.serve.proxy.meter import TAIL_BYTES, usage
from gateway.serve.proxy.wait import Client, Kept, Wait

if TYPE_CHECKING:
    from gateway.serve.proxy.front import Front
    from gateway.serve.proxy.upstream_connection import Link

log = logging.getLogger(__name__)

State = Literal["reading", "queued", "connecting", "asked", "answering", "done"]
Outcome = Literal["", "answered", "left", "broken", "refused", "unreachable"]

_EVENT_END = (b"\n\n", b"\r\n\r\n", b"\r\r")
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[\w-]{1,120})"')


@dataclass(slots=True, eq=False)
class Answer:
    """One request's answer, and all that is known of the request."""

    front: Front
    endpoint: Endpoint
    found: dict[bytes, bytes]  # the client's headers that count
    key: Key  # who calls
    id: str
    keep: bool  # the client's connection may live on
    chunks: bool  # the client understands chunks
    lines: bytes  # of its head that go to the engine
    client: Client = field(init=False)
    call: Call = field(init=False)
    body: bytes | bytearray = b""  # what is here and not yet sent
    whole: bool = False  # all of it was received
    large: bool = False  # it has, or waits for, room
    state: State = "reading"
    status: int = 0
    events: bool = False  # the answer is an event stream
    promised: bool = False  # the head of one was written while the request waited
    started: float = 0.0
    first_byte_at: float = 0.0
    outcome: Outcome = ""
    model: str = ""  # the name of a model that there is
    received: int = 0  # bytes of the request's body, when it was started
    counted: Any = None  # where the meter counts it
    replica: Replica | None = None
    _permit: limits.Permit | None = None
    _usage: tuple[int | None, int | None] | None = None
    _content_type: bytes = b""
    _wait: Wait | None = None
    _kept: Kept | None = None
    _link: Link | None = None
    _dial: asyncio.Task[None] | None = None
    _retried: bool = False
    _quiet_since: float = 0.0

    @property
    def sent(self) -> int:
        """Bytes of the answer's body so far."""
        return self._link.sent if self._link is not None else 0

    @property
    def tail(self) -> tuple[bytes, ...]:
        """The last pieces of the answer's body."""
        return tuple(self._link.tail) if self._link is not None else ()

    @property
    def usage(self) -> tuple[int | None, int | None]:
        """Prompt and completion tokens, as the answer told them; None where it did not."""
        if self._usage is None:
            link = self._link
            self._usage = usage(link.tail) if link is not None and 200 <= self.status < 300 else (None, None)
        return self._usage

    # --- the engine's side ---

    def head(self, link: Link, status: int) -> None:
        """The head of the answer. The client's is written anew too."""
        if not (200 <= status < 300 or 400 <= status < 600):
            self._let_go()
            self.refuse(
                UpstreamError(
                    f"The engine answered with status {status}, which is no answer to an inference request.",
                    hint="Check that the model's endpoint is the address of an OpenAI-compatible server.",
                )
            )
            return
        head = answer_head(
            *(status, link.headers, link.length, self.own_headers(), self.id.encode()),
            chunks=self.chunks,
            keep=self.keep,
        )
        self.status = status
        self.state = "answering"
        if not self.promised:
            self.events, self.keep, link.framed = head.events, head.keep, head.framed
            link.out.append(head.data)
        elif head.events:
            link.framed = head.framed
        else:
            self.client = self._kept = Kept()

    def own_headers(self) -> bytes:
        """The lines of the answer's head that are the gateway's own."""
        plane = self.front.plane
        own = plane.date(self.front.server_state.default_headers)
        return own if self._permit is None else own + self._permit.lines(plane.loop.time())

    def first_byte(self, data: bytes) -> None:
        plane = self.front.plane
        self.first_byte_at = plane.loop.time()
        plane.meter.first_byte(self)
        if self.replica is not None:
            plane.routes.progress(self.replica)
            if self.endpoint.path == "/v1/responses" and self.status < 300 and (match := _RESPONSE_ID.search(data, 0, 4096)):
                plane.routes.responses.made(match[1], self.key, self.replica.seed)

    def end(self, link: Link, *, reusable: bool) -> None:
        """The answer is complete."""
        if link.framed:
            link.out.append(b"0\r\n\r\n")
        link.flush()
        if self._kept is not None:
            self._last_event(self._kept.event(self.endpoint.shape))
        self._part(link, reusable=reusable)

    def _part(self, link: Link, *, reusable: bool) -> None:
        """All of the answer is written."""
        self._finish("answered")
        if reusable and self.whole and not link.transport.get_write_buffer_size():
            link.pool.give(link)
        else:
            link.drop()
        self.front.answered(self)

    def answered(self, link: Link, status: int, lines: bytes, body: bytes) -> None:
        """The answer came whole, with a head that is known: as `head`, `first_byte` and `end`."""
        self.status = status
        link.sent = len(body)
        if body:
            link.tail.append(body[-TAIL_BYTES:])
            self.first_byte(body)
        self.client.write(whole_answer(status, lines, self.own_headers(), self.id.encode(), body))
        self._part(link, reusable=True)

    def broke(self, link: Link, reason: str) -> None:
        """The engine broke off, or cannot be understood."""
        log.warning("%s: %s broke off: %s", self.id, self.replica, reason)
        link.flush()
        self._let_go()
        if self.status:
            self.refuse(UpstreamError("The engine broke off in its answer.", hint="Ask again; what came so far is incomplete."))
        else:
            self.refuse(
                UpstreamError(
                    "The engine broke off before it answered.", hint="Try again; the engine's log says what happened to it."
                )
            )

    # --- endings ---

    def _let_go(self) -> None:
        """Of the engine, at once."""
        if self._dial is not None:
            self._dial.cancel()
        if self._link is not None:
            self._link.drop()

    def refuse(self, error: FitserveError) -> None:
        """An answer that has started cannot be taken back. An event stream ends with the error, anything else is cut off."""
        if not self.status and not self.promised:
            self._finish("refused")
            self.front.refuse(self, error)
            return
        if not self.status:
            self.front.plane.meter.refused(self, error)
        self.keep = False
        if self.events:
            event = error_event(error, self.endpoint.shape)
            if self._kept is None and not b"".join((b"\n\n", *self.tail)).endswith(_EVENT_END):
                event = b"\n\n" + event
            self._last_event(event)
        self._finish("broken" if self.status else "refused")
        self.front.answered(self)

    def _last_event(self, event: bytes) -> None:
        self.front.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event) if self.chunks else event)

    def _finish(self, outcome: Outcome) -> None:
        if self.state == "queued" and self._wait is not None:
            self.front.plane.routes.forget(self._wait)
        self.outcome = outcome
        if self.state != "reading":
            self.front.plane.meter.finished(self)
        self.state = "done"
        self.body = b""
        if self.large:
            self.front.plane.room.leave(self)
        self._release(outcome)
        if self._permit is not None:
            self._permit.end(self._tokens(self._permit), self.front.plane.loop.time())

    def _tokens(self, permit: limits.Permit) -> int:
        """What this cost its key."""
        prompt, completion = self.usage
        bucket = permit.account.tokens
        if prompt is not None or completion is not None or bucket is None:
            return (prompt or 0) + (completion or 0)
        asked = self._link is not None and self.endpoint.body == "json" and self.status < 300 and self.outcome != "refused"
        return limits.estimate(self.received, self.sent, events=self.events, most=bucket.size) if asked else 0

    def _release(self, outcome: Outcome) -> None:
        self.outcome = outcome
        if self.replica is not None:
            self.front.plane.meter.ended(self)
            self.front.plane.routes.end(self.replica, self.call.tokens)
            self.replica = None
