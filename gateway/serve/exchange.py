"""One inference request and its answer: a plain object between the client's connection and an engine's; no task.

    state        what it waits for                         the client leaves       the engine fails
    reading      the client's body, and its turn on a      forgotten               -
                 pipelined connection
    queued       a replica with room for it                forgotten               -
    connecting   a connection to the replica               the dial is cancelled   another replica, once; then 502 unreachable
    asked        the head of the engine's answer           connection aborted      502 engine_error; never tried again, it may
                                                                                   have generated already
    answering    the rest of the answer                    connection aborted      events: an error event, then the end, never
                                                                                   [DONE]; else a broken transfer
    done         -                                         -                       -

Every request that was given to a replica is taken from it once, by `_release`. The front calls start, more, complete, leave, pause,
resume, sweep and stop; who waits for it calls ask or refuse; the link calls connected or unreachable, then head, first_byte, and end
or broke.
"""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from gateway.errors import EngineUnreachable, FitserveError, NotReady, UpstreamError
from gateway.serve import bodies, limits
from gateway.serve.auth import Key
from gateway.serve.heads import answer_head, request_head
from gateway.serve.meter import usage
from gateway.serve.patience import Client, Kept, Wait
from gateway.serve.protocol import error_event
from gateway.serve.routes import Call, Replica
from gateway.serve.surface import Endpoint

if TYPE_CHECKING:
    from gateway.serve.front import Front
    from gateway.serve.upstream import Link

log = logging.getLogger(__name__)

State = Literal["reading", "queued", "connecting", "asked", "answering", "done"]
Outcome = Literal["", "answered", "left", "broken", "refused", "unreachable"]

_EVENT_END = (b"\n\n", b"\r\n\r\n", b"\r\r")
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[\w-]{1,120})"')


@dataclass(slots=True, eq=False)
class Exchange:
    """One request, and what has become of it."""

    front: Front
    endpoint: Endpoint
    found: dict[bytes, bytes]  # the client's headers that count
    key: Key  # who calls
    id: str
    keep: bool  # the client's connection may live on
    chunks: bool  # the client understands chunks
    client: Client = field(init=False)
    call: Call = field(init=False)
    body: bytes | bytearray = b""  # what is here and not yet sent
    whole: bool = False  # all of it was received
    large: bool = False  # it has, or waits for, room
    state: State = "reading"
    status: int = 0
    events: bool = False  # the answer is an event stream
    promised: bool = False  # the head of one was written while the request waited
    heard: bool = False  # the engine said something since the last sweep
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

    def __post_init__(self) -> None:
        self.client = self.front.transport

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
            self._usage = usage(self.tail) if 200 <= self.status < 300 else (None, None)
        return self._usage

    # --- the front's side ---

    def start(self) -> None:
        """Its turn has come, and enough of the body is here. Raises FitserveError as long as no engine was asked."""
        plane = self.front.plane
        self.started = plane.loop.time()
        content_type = self.found.get(b"content-type")
        self.call, self._content_type = bodies.read_call(self.endpoint, content_type, self.body, plane.routes, self.key)
        route = plane.routes.table.find(self.call.model, self.key)
        self.endpoint.check(route.name, route.task)
        self.model, self.received = route.name, len(self.body)
        replica = plane.routes.pick(route, self.call)
        self._permit = plane.limiter.admit(self.key, self.endpoint.shape, self.started)
        self._place(replica)

    def may_start(self) -> bool:
        """Whether it can go to an engine now, although more of the body is to come. Raises BadRequest."""
        return self.state == "reading" and bodies.may_stream(
            self.endpoint, self.found.get(b"content-type"), self.body, self.front.plane.routes, self.key
        )

    def more(self, data: bytes) -> None:
        """A piece of the body."""
        link = self._link
        if link is not None:
            link.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if b"content-length" not in self.found else data)
        elif not self.body:
            self.body = data
        else:
            if isinstance(self.body, bytes):
                self.body = bytearray(self.body)
            self.body += data

    def complete(self) -> None:
        """That was all of the body."""
        self.whole = True
        if self._link is not None and b"content-length" not in self.found:
            self._link.transport.write(b"0\r\n\r\n")

    def leave(self) -> None:
        """The client is gone: whatever this waits for is not wanted any more."""
        if self.state != "done":
            self._let_go()
            self._finish("left")

    def pause(self) -> None:
        """The client reads slowly: the engine is read as slowly."""
        if self._link is not None:
            self._link.transport.pause_reading()

    def resume(self) -> None:
        if self._link is not None:
            self._link.transport.resume_reading()

    def sweep(self, now: float) -> None:
        """Twice a second: an engine that has said nothing for very long is given up. A prefill is silent too."""
        if self.state == "queued" and self._wait is not None:
            self._wait.sweep(now)
        elif self.state not in ("asked", "answering") or self.heard:
            if self.heard and self.state == "answering" and self.replica is not None:
                self.front.plane.routes.progress(self.replica)
            self.heard = False
            self._quiet_since = now
        elif now - self._quiet_since > self.front.plane.limits.engine_silence_s and self._link is not None:
            self.broke(self._link, "it has been silent for too long")

    def stop(self) -> None:
        """The gateway stops before the answer is complete."""
        self._let_go()
        self.keep = False
        if self.state != "done":
            self.refuse(NotReady("The gateway stops.", hint="Ask again in a moment.", retry_after_s=5))

    # --- the engine's side ---

    def _place(self, replica: Replica | None, avoid: str | None = None) -> None:
        """It goes to the replica, or waits for one."""
        if replica is not None:
            self.ask(replica)
        else:
            self.state = "queued"
            self._wait = Wait(self, avoid)
            self.front.plane.routes.wait(self._wait)

    def ask(self, replica: Replica) -> None:
        plane = self.front.plane
        plane.routes.begin(replica, self.call.tokens)
        self.replica = replica
        plane.meter.begun(self)
        pool = plane.pool(replica.url)
        link = pool.take()
        if link is not None:
            self.connected(link)
        else:
            self.state = "connecting"
            self._dial = pool.dial(self)

    def connected(self, link: Link) -> None:
        """The request is written, to a replica that takes connections."""
        self._dial = None
        self._link = link
        self.state = "asked"
        self.heard = True
        body = self.body
        if self.replica is not None and self.replica.served_name != self.call.model:
            body = bodies.renamed(self.endpoint, self.found.get(b"content-type"), body, self.replica.served_name)
        described = self._content_type
        if self.whole:
            described += b"content-length: %d\r\n" % len(body) if self.endpoint.method == "POST" else b""
        elif (announced := self.found.get(b"content-length")) is not None:
            described += b"content-length: %d\r\n" % (int(announced) + len(body) - len(self.body))
        else:
            described += b"transfer-encoding: chunked\r\n"
            body = b"%x\r\n%b\r\n" % (len(body), bytes(body))
        head = request_head(self.endpoint, link.pool.prefix, link.pool.authority, self.id.encode(), described, self.found)
        self.body = self.call.body = b""
        link.ask(self, head, body)
        if self.large or not self.whole:
            self.front.uploaded(self, link.transport.get_write_buffer_size())

    def unreachable(self, error: Exception) -> None:
        """The replica took no connection, so it has not seen the request: another one may, once."""
        self._dial = None
        failed, plane = self.replica, self.front.plane
        log.warning("%s: no connection to %s: %r", self.id, failed, error)
        self._release("unreachable")
        if failed is not None and not self._retried:
            self._retried = True
            try:
                route = plane.routes.table.find(self.call.model)
                avoid = failed.id if failed in route.replicas else None
                if avoid is None or len(route.replicas) > 1 or route.wait_s:
                    self._place(plane.routes.pick(route, self.call, avoid), avoid)
                    return
            except FitserveError as refusal:
                self.refuse(refusal)
                return
        self.refuse(
            EngineUnreachable(
                "The engine of this model does not take connections.", hint="The gateway restarts it if it died; try again."
            )
        )

    def head(self, link: Link, status: int, headers: list[tuple[bytes, bytes]]) -> None:
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
        head = answer_head(status, headers, self.own_headers(), self.id.encode(), chunks=self.chunks, keep=self.keep)
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
            if self.endpoint.name == "responses" and (match := _RESPONSE_ID.search(data, 0, 4096)):
                plane.routes.made(match[1].decode(), self.call.model, self.replica)

    def end(self, link: Link, *, reusable: bool) -> None:
        """The answer is complete."""
        if link.framed:
            link.out.append(b"0\r\n\r\n")
        link.flush()
        if self._kept is not None:
            self._last_event(self._kept.event(self.endpoint.shape))
        self._finish("answered")
        if reusable and self.whole and not link.transport.get_write_buffer_size():
            link.pool.give(link)
        else:
            link.drop()
        self.front.answered(self)

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
