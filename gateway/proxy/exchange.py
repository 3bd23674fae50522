"""One inference request and its answer: a plain object between the client's connection and an
    engine's; no task. Here is what happens when;
how the request comes in and the answer goes out: `IncomingRequest` and `AnsweredRequest`, on which
this one is built.

    state        what it waits for                         the client leaves       the engine fails
    reading      the client's body, and its turn on a      forgotten               -
                 pipelined connection
    queued       a replica with room for it                forgotten               -
    connecting   a connection to the replica               the dial is cancelled   another replica, once; then 502 unreachable
    asked        the head of the engine's answer           connection aborted      another replica, once; without one 502 engine_error
    answering    the rest of the answer                    connection aborted      events: an error event, then the end, never
                                                                                   [DONE]; else a
                                                                                   broken transfer
    done         -                                         -                       -

An engine that freezes, as the table of routes says, is left: another replica is asked, once, where
no byte of the answer's body came and the request is still here (SMALL_BYTES of it are kept until
then); else the client hears that the engine broke off, or 503. So is an engine that dies: its
connection closes before it answered, or its answer is that it dies (DYING). A request that kills
its engine so kills two at most.

Every request that was given to a replica is taken from it once, by `_release`. The client's
connection calls start, more, complete, leave, pause, resume, sweep, cancel and stop; `QueueWait`
calls ask, refuse or fail; the pool calls connected or unreachable; the connection to the engine
then calls head, first_byte, and end or broke, or `answered` in their place.
"""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass
from typing import Any, Literal

from gateway.errors import Cancelled, FitserveError
from gateway.proxy import refusals
from gateway.proxy.access import rate_limits
from gateway.proxy.answered_request import AnsweredRequest
from gateway.proxy.bodies import request_body
from gateway.proxy.bodies.body_budget import SMALL_BYTES, no_room
from gateway.proxy.heads import MOST_HOPS, hops, whole_answer
from gateway.proxy.queue_wait import QueueWait
from gateway.proxy.routing.table import RoutedReplica
from gateway.proxy.upstream_connection import TAIL_BYTES, UpstreamConnection

log = logging.getLogger(__name__)

Outcome = Literal["", "answered", "left", "broken", "cancelled", "refused", "unreachable"]

# What vLLM answers from when its core has died until its server ends: ENGINE_DEAD_MESSAGE (0.18.0
# to 0.33.0, v1/engine/exceptions.py).
DYING = b"EngineCore encountered an issue"
_DYING_STATUS = 500
_UNAUTHORIZED = 401
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[\w-]{1,120})"')


@dataclass(slots=True, eq=False)
class Exchange(AnsweredRequest):
    """One request, its answer, and all that is known of both."""

    started: float = 0.0
    first_byte_at: float = 0.0
    outcome: Outcome = ""
    model: str = ""  # the name of a model that there is
    counted: Any = None  # where the meter counts it
    replica: RoutedReplica | None = None
    _wait: QueueWait | None = None
    _dial: asyncio.Task[None] | None = None
    _retried: bool = False
    _again: request_body.Body = b""  # the body, as long as another replica may be asked
    _quiet_since: float = 0.0

    # --- the client's side ---

    def start(self) -> None:
        """Its turn has come, and enough of the body is here. Raises FitserveError as long as no
        engine was asked."""
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
        if (
            b"via" in self.found
            and hops(self.found) >= MOST_HOPS
            and any(one.elsewhere for one in route.replicas)
        ):
            raise refusals.loops(route.name, MOST_HOPS)
        if self.key.limit is not None:
            self._permit = plane.limiter.admit(self.key, self.endpoint.shape, self.started)
        self._place(replica)

    def give_up(self, error: FitserveError) -> None:
        """There is no room for the body any more."""
        if self._upstream is not None:
            self.broke(
                self._upstream, "it takes the request too slowly while others wait for memory"
            )
        else:
            self.connection.give_up(self, error)

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
        """Twice a second: an engine that has said nothing for very long is given up. A prefill is
        silent too."""
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
        """Somebody who may ends it."""
        self.fail(refusals.cancelled())

    def stop(self) -> None:
        """The gateway stops before the answer is complete."""
        self.keep = False
        self.fail(refusals.stops())

    def fail(self, error: FitserveError) -> None:
        """Ends it, wherever it stands: its engine is let go of, and its client told."""
        self._let_go()
        if self.state != "done":
            self.refuse(error)

    # --- which engine is asked ---

    def _place(self, replica: RoutedReplica | None, avoid: str | None = None) -> None:
        """It goes to the replica, or waits for one."""
        if replica is not None:
            self.ask(replica)
        else:
            if (
                len(self.body) > SMALL_BYTES
                and not self.held
                and self.plane.body_budget.crowded(self.account)
            ):
                raise no_room()
            self.keep_body()
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
            self.keep_body()
            self._dial = pool.dial(self)

    def connected(self, upstream: UpstreamConnection) -> None:
        """The request is written, to a replica that takes connections."""
        self._dial = None
        self._upstream = upstream
        self.state = "asked"
        try:
            head, body = self._written(upstream, self.replica)
        except FitserveError as error:
            self.fail(error)
            return
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
        if (
            failed is not None
            and not self._retried
            and (route is None or not there or len(route.replicas) > 1 or route.wait_s)
        ):
            self._ask_again(failed.id if there else None)
            return
        self.outcome = "unreachable"
        self._release()
        self.refuse(refusals.no_connection())

    def _forsake(self, frozen: RoutedReplica) -> None:
        """The replica has frozen: nobody knows when it goes on, if ever."""
        upstream = self._upstream
        if upstream is not None and upstream.heard:
            upstream.heard = False  # it gave something since the last look: perhaps it thaws
            return
        log.warning("%s: %s is frozen", self.id, frozen)
        self._take_back()
        # A stream's head may be out, which is the same for every replica; the head of another
        # answer is not.
        fresh = not self.status or (self.events and self.status == 200 and not self.sent)
        again, self._again = self._again, b""
        self._let_go()
        self._dial = None
        if not fresh:
            self.refuse(refusals.frozen_in_answer())
        elif (
            self.whole
            and not self._retried
            and (again or self.state == "connecting" or self.endpoint.method != "POST")
        ):
            self.promised = self.promised or bool(self.status)
            if self.state != "connecting":
                self.body = self.call.body = again
            self._ask_again(None)
        else:
            self.refuse(refusals.frozen())

    def _ask_again(self, avoid: str | None) -> None:
        """The request goes to another replica; nothing of an answer has come."""
        self._retried = True
        self.outcome = "unreachable"
        self._release()
        self.status, self._upstream, self._doubted = 0, None, False
        self.client, self._buffered = self.connection.transport, None
        try:
            route = self.plane.routes.table.find(self.call.model)
            self._place(self.plane.routes.pick(route, self.call, avoid), avoid)
        except FitserveError as refusal:
            self.refuse(refusal)

    def _survives(self) -> bool:
        """Its engine dies before it answered: another replica is asked, where there is one and the
        request is still here."""
        dying, again = self.replica, self._again
        route = self.plane.routes.table.models.get(self.call.model)
        if (
            dying is None
            or self._retried
            or not again
            or route is None
            or all(one.id == dying.id for one in route.replicas)
        ):
            return False
        log.warning("%s: %s dies, and another replica is asked", self.id, dying)
        self._again = b""
        self._let_go()
        self.body = self.call.body = again
        self._ask_again(dying.id)
        return True

    # --- the engine's answer ---

    def head(self, upstream: UpstreamConnection, status: int) -> None:
        """The head of the answer. The client's is written anew too."""
        # Whether 205 has a body is not read alike by all clients.
        if not (200 <= status < 300 or 400 <= status < 600) or status == 205:
            self.fail(refusals.no_answer(status))
            return
        if status == _UNAUTHORIZED:
            self.fail(
                refusals.unauthorized(key=self.replica is not None and bool(self.replica.key))
            )
            return
        self.status = status
        self.state = "answering"
        if status == _DYING_STATUS and self._again:
            self._doubted = True
        else:
            self._begin(upstream)

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
            if (
                self.endpoint.path == "/v1/responses"
                and self.status < 300
                and (match := _RESPONSE_ID.search(data, 0, 4096))
            ):
                plane.routes.responses.made(match[1], self.key, self.replica.seed)

    def end(self, upstream: UpstreamConnection, *, reusable: bool) -> None:
        """The answer is complete."""
        if self._doubted:
            self._begin(upstream)
        self._complete_answer(upstream)
        self._part(upstream, reusable=reusable)

    def _part(self, upstream: UpstreamConnection, *, reusable: bool) -> None:
        """All of the answer is written."""
        self._finish("answered")
        if reusable and self.whole and not upstream.transport.get_write_buffer_size():
            upstream.pool.give(upstream)
        else:
            upstream.drop()
        self.connection.answered(self)

    def answered(
        self, upstream: UpstreamConnection, status: int, lines: bytes, body: bytes
    ) -> None:
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
            self.client.write(
                whole_answer(status, lines, self.own_headers(), self.id.encode(), body)
            )
        self._part(upstream, reusable=True)

    def broke(self, upstream: UpstreamConnection, reason: str, *, closed: bool = False) -> None:
        """The engine broke off, or cannot be understood. closed: its connection was closed."""
        self._take_back()
        if closed and not self.status and self._survives():
            return
        log.warning("%s: %s broke off: %s", self.id, self.replica, reason)
        upstream.flush()
        self.fail(refusals.broke_off_in_answer() if self.status else refusals.broke_off())

    # --- endings ---

    def _let_go(self) -> None:
        """Of the engine, at once."""
        if self._dial is not None:
            self._dial.cancel()
        if self._upstream is not None:
            self._upstream.drop()

    def refuse(self, error: FitserveError) -> None:
        """What the client has of an answer stays. An event stream ends with the error, anything
        else is cut off."""
        self._take_back()
        if not self.status and not self.promised:
            self._finish("refused")
            self.connection.refuse(self, error)
            return
        if not self.status:
            self.plane.meter.refused(self, error)
        self.keep = False
        if self.events:
            self._end_with(error)
        cut: Outcome = "cancelled" if isinstance(error, Cancelled) else "broken"
        self._finish(cut if self.status else "refused")
        self.connection.answered(self)

    def _finish(self, outcome: Outcome) -> None:
        if self.state == "queued" and self._wait is not None:
            self.plane.routes.forget(self._wait)
        self.outcome = outcome
        if self.state != "reading":
            self.plane.meter.finished(self)
        self.state = "done"
        if self.held:
            self.release_body()
        self._release()
        if self._permit is not None:
            self._permit.end(self._tokens(self._permit), self.plane.loop.time())

    def _tokens(self, permit: rate_limits.Permit) -> int:
        """What this cost its key."""
        prompt, completion, _ = self.usage
        bucket = permit.account.tokens
        if prompt is not None or completion is not None or bucket is None:
            return (prompt or 0) + (completion or 0)
        asked = (
            self._upstream is not None
            and self.endpoint.body == "json"
            and self.status < 300
            and self.outcome != "refused"
        )
        return (
            rate_limits.estimate(self.received, self.sent, events=self.events, most=bucket.size)
            if asked
            else 0
        )

    def _release(self) -> None:
        """The replica has done with it."""
        if self.replica is not None:
            self.plane.meter.ended(self)
            self.plane.routes.end(self.replica, self.call.tokens)
            self.replica = None
