"""One inference request and its answer: a plain object between the client's connection and an engine's; no task.

    state        what it waits for                         the client leaves       the engine fails
    reading      the client's body, and its turn on a      forgotten               -
                 pipelined connection
    queued       a replica with room for it                forgotten               -
    connecting   a connection to the replica               the dial is cancelled   another replica, once; then 502 unreachable
    asked        the head of the engine's answer           connection aborted      another replica, once; without one 502 engine_error
    answering    the rest of the answer                    connection aborted      events: an error event, then the end, never
                                                                                   [DONE]; else a broken transfer
    done         -                                         -                       -

An engine that freezes, as the table of routes says, is left: another replica is asked, once, where no byte of the answer's body came and the
request is still here (SMALL_BYTES of it are kept until then); else the client hears that the engine broke off, or 503. So is an engine that
dies: its connection closes before it answered, or its answer is that it dies (DYING). A request that kills its engine so kills two at most.

Every request that was given to a replica is taken from it once, by `_release`. The client's connection calls start, more, complete, leave,
pause, resume, sweep, cancel and stop; `QueueWait` calls ask or refuse; the pool calls connected or unreachable; the connection to the engine then
calls head, first_byte, and end or broke, or `answered` in their place.
"""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from uvicorn.server import ServerState

from gateway.access import rate_limits
from gateway.access.auth import Key
from gateway.api.endpoints import Endpoint, Shape
from gateway.api.protocol import anthropic_error, error_event
from gateway.errors import Cancelled, EngineUnreachable, FitserveError, LoopDetected, NotReady, UpstreamError
from gateway.routing.table import Call, RoutedReplica
from gateway.serve.proxy import request_body
from gateway.serve.proxy.body_budget import SMALL_BYTES, no_room
from gateway.serve.proxy.data_plane import DataPlane
from gateway.serve.proxy.heads import MOST_HOPS, answer_head, hops, request_head, via_line, whole_answer
from gateway.serve.proxy.meter import TAIL_BYTES, UNTOLD, TokenUsage, usage
from gateway.serve.proxy.multipart_form import FormReader
from gateway.serve.proxy.queue_wait import BufferedAnswer, QueueWait, Writer
from gateway.serve.proxy.upstream_connection import UpstreamConnection

log = logging.getLogger(__name__)

State = Literal["reading", "queued", "connecting", "asked", "answering", "done"]
Outcome = Literal["", "answered", "left", "broken", "cancelled", "refused", "unreachable"]

# What vLLM answers from when its core has died until its server ends: ENGINE_DEAD_MESSAGE (0.18.0 to 0.33.0, v1/engine/exceptions.py).
DYING = b"EngineCore encountered an issue"
_DYING_STATUS = 500
_UNAUTHORIZED = 401
_EVENT_END = (b"\n\n", b"\r\n\r\n", b"\r\r")
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[\w-]{1,120})"')


class ClientSide(Protocol):
    """The connection of the client, `ClientConnection`, as far as an exchange calls it."""

    transport: asyncio.Transport
    server_state: ServerState
    address: str

    @property
    def write_paused(self) -> bool:
        """Whether the client has yet to take what is written."""

    def refuse(self, exchange: Exchange, error: FitserveError) -> None:
        """Answers with an error of the gateway's own. Only for an exchange whose answer has not started."""

    def answered(self, exchange: Exchange) -> None:
        """The answer to `exchange` is written, or broken off."""

    def give_up(self, exchange: Exchange, error: FitserveError, /) -> None:
        """`exchange` is refused while its body comes in."""

    def pause_upload(self) -> None:
        """The engine takes the body slowly: the client is read as slowly."""

    def resume_upload(self) -> None:
        """The client is read again."""


@dataclass(slots=True, eq=False)
class Exchange:
    """One request, its answer, and all that is known of both."""

    plane: DataPlane
    connection: ClientSide
    endpoint: Endpoint
    found: dict[bytes, bytes]  # the client's headers that count
    key: Key  # who calls
    id: str
    keep: bool  # the client's connection may live on
    chunks: bool  # the client understands chunks
    lines: bytes  # of its head that go to the engine
    client: Writer = field(init=False)
    call: Call = field(init=False)
    body: bytes | bytearray = b""  # what is here and not yet sent
    whole: bool = False  # all of it was received
    held: bool = False  # its body is counted by the `BodyBudget`
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
    replica: RoutedReplica | None = None
    _permit: rate_limits.Permit | None = None
    _usage: TokenUsage | None = None
    _content_type: bytes = b""
    _form: FormReader | None = None  # has read what came so far of a form
    _wait: QueueWait | None = None
    _buffered: BufferedAnswer | None = None
    _upstream: UpstreamConnection | None = None
    _dial: asyncio.Task[None] | None = None
    _retried: bool = False
    _again: bytes | bytearray = b""  # the body, as long as another replica may be asked
    _doubted: bool = False  # the head of an answer has come and is not passed on: the engine may be saying that it dies
    _quiet_since: float = 0.0

    @property
    def address(self) -> str:
        """Of the client."""
        return self.connection.address

    @property
    def shape(self) -> Shape:
        """Whose errors the client expects."""
        return self.endpoint.shape

    @property
    def account(self) -> str:
        """Whose memory the body takes."""
        return self.key.name

    @property
    def moved(self) -> int:
        """Grows with each byte of the body that comes in, and with each that the engine takes."""
        return len(self.body) if self._upstream is None else -self._upstream.transport.get_write_buffer_size()

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
            self._usage = usage(upstream.tail) if upstream is not None and 200 <= self.status < 300 else UNTOLD
        return self._usage

    # --- the client's side ---

    def start(self) -> None:
        """Its turn has come, and enough of the body is here. Raises FitserveError as long as no engine was asked."""
        plane = self.plane
        self.client = self.connection.transport
        self.started = plane.loop.time()
        if self.endpoint.body == "form" and self._form is None:
            self._read_form(self.body)
        self.call, route, self._content_type = request_body.read_call(
            self.endpoint, self._form, self.body, plane.routes, self.key
        )
        self.endpoint.check(route.name, route.task)
        if route.toolless:
            request_body.check_tools(self.endpoint, self.body, route)
        self.model, self.received = route.name, len(self.body)
        replica = plane.routes.pick(route, self.call)
        if b"via" in self.found and hops(self.found) >= MOST_HOPS and any(one.elsewhere for one in route.replicas):
            raise LoopDetected(
                f"This request has passed {MOST_HOPS} gateways, and the endpoints of {route.name} lead on: perhaps back here.",
                hint="Whoever runs them finds the endpoints of each with `fitserve show`.",
            )
        if self.key.limit is not None:
            self._permit = plane.limiter.admit(self.key, self.endpoint.shape, self.started)
        self._place(replica)

    def may_start(self) -> bool:
        """Whether it can go to an engine now, although more of the body is to come."""
        form = self._form
        if form is None or self.state != "reading":
            return False
        return request_body.may_stream(form, len(self.body), self.plane.routes, self.key)

    def _read_form(self, data: bytes | bytearray) -> None:
        if self._form is None:
            self._form = FormReader(self.found.get(b"content-type"))
        self._form.feed(data)

    def keep_body(self) -> None:
        """What is here of the body stays here until the requests before it are answered."""
        self._keep(len(self.body))

    def has_room(self) -> bool:
        """Whether more of the body may come now; else the client is read again when it may. Raises Busy."""
        if self.state != "reading" or len(self.body) <= SMALL_BYTES:
            return True
        self.held = True
        return self.plane.body_budget.grow(self, len(self.body))

    def release_body(self) -> None:
        """Nothing of the body is kept here any more."""
        self.body = b""
        if self.held:
            self.held = False
            self.plane.body_budget.leave(self)

    def go_on(self) -> None:
        """There is room for more of the body."""
        self.connection.resume_upload()

    def give_up(self, error: FitserveError) -> None:
        """There is no room for the body any more."""
        if self._upstream is not None:
            self.broke(self._upstream, "it takes the request too slowly while others wait for memory")
        else:
            self.connection.give_up(self, error)

    def more(self, data: bytes) -> None:
        """A piece of the body. Raises BadRequest: also what goes on to an engine at once is read first."""
        if self.endpoint.body == "form":
            self._read_form(data)
        upstream = self._upstream
        if upstream is not None:
            upstream.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if b"content-length" not in self.found else data)
        elif not self.body:
            self.body = data
        else:
            if isinstance(self.body, bytes):
                self.body = bytearray(self.body)
            self.body += data

    def complete(self) -> None:
        """That was all of the body."""
        self.whole = True
        if self._upstream is not None and b"content-length" not in self.found:
            self._upstream.transport.write(b"0\r\n\r\n")

    def leave(self) -> None:
        """The client is gone: whatever this waits for is not wanted any more."""
        if self.state != "done":
            self._let_go()
            self._finish("left")

    def pause(self) -> None:
        """The client reads slowly: the engine is read as slowly."""
        if self._upstream is not None:
            self._upstream.transport.pause_reading()

    def resume(self) -> None:
        if self._upstream is not None:
            self._upstream.transport.resume_reading()

    def sweep(self, now: float) -> None:
        """Twice a second: an engine that has said nothing for very long is given up. A prefill is silent too."""
        upstream = self._upstream
        if self.state == "queued" and self._wait is not None:
            self._wait.sweep(now)
        elif self.replica is not None and self.replica.id in self.plane.routes.table.frozen:
            self._forsake(self.replica)
        elif upstream is None or upstream.heard:
            self._quiet_since = now
            if upstream is not None:
                upstream.heard = False
                if self.state == "answering" and self.replica is not None:
                    self.plane.routes.progress(self.replica)
        elif now - self._quiet_since > self.plane.limits.engine_silence_s:
            self.broke(upstream, "it has been silent for too long")

    def cancel(self) -> None:
        """Somebody who may ends it: its engine is let go of, and its client told."""
        self._let_go()
        if self.state != "done":
            self.refuse(
                Cancelled("Whoever runs this gateway has ended this request.", hint="Ask them before you send it again.")
            )

    def stop(self) -> None:
        """The gateway stops before the answer is complete."""
        self._let_go()
        self.keep = False
        if self.state != "done":
            self.refuse(NotReady("The gateway stops.", hint="Ask again in a moment.", retry_after_s=5))

    # --- the engine's side ---

    def _place(self, replica: RoutedReplica | None, avoid: str | None = None) -> None:
        """It goes to the replica, or waits for one."""
        if replica is not None:
            self.ask(replica)
        else:
            if len(self.body) > SMALL_BYTES and not self.held and self.plane.body_budget.crowded(self.account):
                raise no_room()
            self._keep(len(self.body))
            self.state = "queued"
            self._wait = QueueWait(self, avoid)
            self.plane.routes.wait(self._wait)

    def ask(self, replica: RoutedReplica) -> None:
        plane = self.plane
        plane.routes.begin(replica, self.call.tokens)
        self.replica = replica
        plane.meter.begun(self)
        pool = plane.pool(replica.url)
        upstream = pool.take()
        if upstream is not None:
            self.connected(upstream)
        else:
            self.state = "connecting"
            self._keep(len(self.body))
            self._dial = pool.dial(self)

    def connected(self, upstream: UpstreamConnection) -> None:
        """The request is written, to a replica that takes connections."""
        self._dial = None
        self._upstream = upstream
        self.state = "asked"
        body, described, replica = self.body, self._content_type, self.replica
        if replica is not None:
            described += replica.key_line
            if replica.elsewhere:
                described += via_line(hops(self.found))
            name = replica.name_of(self.call.asked) if replica.adapters else replica.served_name
            if name != (self.call.asked or self.call.model):
                body = request_body.renamed(self.endpoint, self._form, body, name)
        if self.whole:
            if self.endpoint.method == "POST":
                described += b"content-length: %d\r\n" % len(body)
        elif (announced := self.found.get(b"content-length")) is not None:
            described += b"content-length: %d\r\n" % (int(announced) + len(body) - len(self.body))
        else:
            described += b"transfer-encoding: chunked\r\n"
            body = b"%x\r\n%b\r\n" % (len(body), bytes(body))
        head = request_head(
            self.endpoint, upstream.pool.prefix, upstream.pool.authority, self.id.encode(), described, self.lines
        )
        if self.whole and not self._retried and len(self.body) <= SMALL_BYTES:
            self._again = self.body
        self.body = self.call.body = b""
        upstream.ask(self, head, body)
        if self.connection.write_paused:
            self.pause()  # the client has yet to take the answer before
        if self.held or not self.whole or len(body) > SMALL_BYTES:
            self._uploaded(upstream.transport.get_write_buffer_size())

    def unreachable(self, error: Exception) -> None:
        """The replica took no connection, so it has not seen the request: another one may, once."""
        self._dial = None
        failed, route = self.replica, self.plane.routes.table.models.get(self.call.model)
        log.warning("%s: no connection to %s: %r", self.id, failed, error)
        there = route is not None and failed in route.replicas
        if failed is not None and not self._retried and (route is None or not there or len(route.replicas) > 1 or route.wait_s):
            self._ask_again(failed.id if there else None)
            return
        self._release("unreachable")
        self.refuse(
            EngineUnreachable(
                "The engine of this model does not take connections.", hint="The gateway restarts it if it died; try again."
            )
        )

    def _forsake(self, frozen: RoutedReplica) -> None:
        """The replica has frozen: nobody knows when it goes on, if ever."""
        upstream = self._upstream
        if upstream is not None and upstream.heard:
            upstream.heard = False  # it gave something since the last look: perhaps it thaws
            return
        log.warning("%s: %s is frozen", self.id, frozen)
        # A stream's head may be out, which is the same for every replica; the head of another answer is not.
        fresh = not self.sent and (not self.status or (self.events and self.status == 200))
        again, self._again = self._again, b""
        self._let_go()
        self._dial = None
        error: FitserveError = NotReady(
            "The engine of this model has stopped answering.",
            hint="The gateway replaces it unless it goes on; try again.",
            retry_after_s=10,
        )
        if not fresh:
            error = UpstreamError("The engine has stopped in its answer.", hint="Ask again; what came so far is incomplete.")
        elif self.whole and not self._retried and (again or self.state == "connecting" or self.endpoint.method != "POST"):
            self.promised = self.promised or bool(self.status)
            if self.state != "connecting":
                self.body = self.call.body = again
            self._ask_again(None)
            return
        self.refuse(error)

    def _ask_again(self, avoid: str | None) -> None:
        """The request goes to another replica; nothing of an answer has come."""
        self._retried = True
        self._release("unreachable")
        self.status, self._upstream, self._doubted = 0, None, False
        self.client, self._buffered = self.connection.transport, None
        try:
            route = self.plane.routes.table.find(self.call.model)
            self._place(self.plane.routes.pick(route, self.call, avoid), avoid)
        except FitserveError as refusal:
            self.refuse(refusal)

    def _survives(self) -> bool:
        """Its engine dies before it answered: another replica is asked, where there is one and the request is still here."""
        dying, again = self.replica, self._again
        route = self.plane.routes.table.models.get(self.call.model)
        if dying is None or self._retried or not again or route is None or all(one.id == dying.id for one in route.replicas):
            return False
        log.warning("%s: %s dies, and another replica is asked", self.id, dying)
        self._again = b""
        self._let_go()
        self.body = self.call.body = again
        self._ask_again(dying.id)
        return True

    def pause_upload(self) -> None:
        """The engine takes the body slowly."""
        self.connection.pause_upload()

    def resume_upload(self) -> None:
        """The engine has taken all of the body that was here."""
        self._uploaded(0)

    def _uploaded(self, left: int) -> None:
        """What was here of the body is written to the engine, but for `left` bytes: `resume_upload` comes when many of them are."""
        if left > SMALL_BYTES:
            self._keep(left, pressed=True)
            return
        self.release_body()
        self.connection.resume_upload()

    def _keep(self, size: int, *, pressed: bool = False) -> None:
        """The body stays here for a while."""
        if self.held or size > SMALL_BYTES:
            self.held = True
            self.plane.body_budget.keep(self, size, pressed=pressed)

    def head(self, upstream: UpstreamConnection, status: int) -> None:
        """The head of the answer. The client's is written anew too."""
        # Whether 205 has a body is not read alike by all clients.
        if not (200 <= status < 300 or 400 <= status < 600) or status == 205:
            self._let_go()
            self.refuse(
                UpstreamError(
                    f"The engine answered with status {status}, which is no answer to an inference request.",
                    hint="Check that the model's endpoint is the address of an OpenAI-compatible server.",
                )
            )
            return
        if status == _UNAUTHORIZED:
            # The client's own key was good, and the engine's words may repeat the gateway's.
            key = self.replica is not None and self.replica.key
            self._let_go()
            self.refuse(
                UpstreamError(
                    f"The engine of this model {'refused the key of the gateway' if key else 'wants a key, and the gateway has none for it'}.",
                    hint="It is not your key that is meant; whoever runs the gateway sees more with `fitserve show`.",
                )
            )
            return
        self.status = status
        self.state = "answering"
        if status == _DYING_STATUS and self._again:
            self._doubted = True
        else:
            self._begin(upstream)

    def _begin(self, upstream: UpstreamConnection) -> None:
        """The head for the client, which the answer follows."""
        self._doubted = False
        if self.status >= 400 and self.endpoint.shape == "anthropic" and not self.promised:
            self.client = self._buffered = BufferedAnswer()
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

    def first_byte(self, data: bytes) -> None:
        plane = self.plane
        if self._doubted and self._upstream is not None:
            if DYING in data and self._survives():
                return
            self._begin(self._upstream)
        self._again = b""
        self.first_byte_at = plane.loop.time()
        plane.meter.first_byte(self)
        if self.replica is not None:
            plane.routes.progress(self.replica)
            if self.endpoint.path == "/v1/responses" and self.status < 300 and (match := _RESPONSE_ID.search(data, 0, 4096)):
                plane.routes.responses.made(match[1], self.key, self.replica.seed)

    def end(self, upstream: UpstreamConnection, *, reusable: bool) -> None:
        """The answer is complete."""
        if self._doubted:
            self._begin(upstream)
        upstream.flush(b"0\r\n\r\n" if upstream.framed else b"")
        if self._buffered is not None and self.promised:
            self._last_event(self._buffered.event(self.endpoint.shape, self.status))
        elif self._buffered is not None:
            self._write_error(self.status, self._buffered.data)
        self._part(upstream, reusable=reusable)

    def _part(self, upstream: UpstreamConnection, *, reusable: bool) -> None:
        """All of the answer is written."""
        self._finish("answered")
        if reusable and self.whole and not upstream.transport.get_write_buffer_size():
            upstream.pool.give(upstream)
        else:
            upstream.drop()
        self.connection.answered(self)

    def answered(self, upstream: UpstreamConnection, status: int, lines: bytes, body: bytes) -> None:
        """The answer came whole, with a head that is known: as `head`, `first_byte` and `end`."""
        if status == _DYING_STATUS and DYING in body and self._survives():
            return
        self.status = status
        upstream.sent = len(body)
        if body:
            upstream.tail.append(body[-TAIL_BYTES:])
            self.first_byte(body)
        if status >= 400 and self.endpoint.shape == "anthropic":
            self._write_error(status, body)
        else:
            self.client.write(whole_answer(status, lines, self.own_headers(), self.id.encode(), body))
        self._part(upstream, reusable=True)

    def _write_error(self, status: int, body: bytes | bytearray) -> None:
        """The engine's error, in the shape that Anthropic's clients read."""
        lines, told = b"content-type: application/json\r\n", anthropic_error(status, body)
        self.connection.transport.write(whole_answer(status, lines, self.own_headers(), self.id.encode(), told))

    def broke(self, upstream: UpstreamConnection, reason: str, *, closed: bool = False) -> None:
        """The engine broke off, or cannot be understood. closed: its connection was closed."""
        if self._doubted:
            self.status, self._doubted = 0, False
        if closed and not self.status and self._survives():
            return
        log.warning("%s: %s broke off: %s", self.id, self.replica, reason)
        upstream.flush()
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
        if self._upstream is not None:
            self._upstream.drop()

    def refuse(self, error: FitserveError) -> None:
        """An answer that has started cannot be taken back. An event stream ends with the error, anything else is cut off."""
        if not self.status and not self.promised:
            self._finish("refused")
            self.connection.refuse(self, error)
            return
        if not self.status:
            self.plane.meter.refused(self, error)
        self.keep = False
        if self.events:
            event = error_event(error, self.endpoint.shape)
            if self._buffered is None and not b"".join((b"\n\n", *self.tail)).endswith(_EVENT_END):
                event = b"\n\n" + event
            self._last_event(event)
        cut: Outcome = "cancelled" if isinstance(error, Cancelled) else "broken"
        self._finish(cut if self.status else "refused")
        self.connection.answered(self)

    def _last_event(self, event: bytes) -> None:
        self.connection.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event) if self.chunks else event)

    def _finish(self, outcome: Outcome) -> None:
        if self.state == "queued" and self._wait is not None:
            self.plane.routes.forget(self._wait)
        self.outcome = outcome
        if self.state != "reading":
            self.plane.meter.finished(self)
        self.state = "done"
        self._again = b""
        self.release_body()
        self._release(outcome)
        if self._permit is not None:
            self._permit.end(self._tokens(self._permit), self.plane.loop.time())

    def _tokens(self, permit: rate_limits.Permit) -> int:
        """What this cost its key."""
        prompt, completion, _ = self.usage
        bucket = permit.account.tokens
        if prompt is not None or completion is not None or bucket is None:
            return (prompt or 0) + (completion or 0)
        asked = self._upstream is not None and self.endpoint.body == "json" and self.status < 300 and self.outcome != "refused"
        return rate_limits.estimate(self.received, self.sent, events=self.events, most=bucket.size) if asked else 0

    def _release(self, outcome: Outcome) -> None:
        self.outcome = outcome
        if self.replica is not None:
            self.plane.meter.ended(self)
            self.plane.routes.end(self.replica, self.call.tokens)
            self.replica = None
