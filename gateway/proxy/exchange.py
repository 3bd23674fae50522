"""An inference request and its answer, as a state machine between two connections; no task.

`Upload` has the body of the request, `ClientAnswer` writes the answer.

    state        waits for                             the client leaves       the engine fails
    reading      body, and turn on the connection      forgotten               -
    queued       a replica with room                   forgotten               -
    connecting   a connection to the replica           dial cancelled          retry or unreachable
    asked        the head of the answer                connection aborted      retry or engine_error
    answering    the rest of the answer                connection aborted      error event, or a cut
    done         -                                     -                       -

The gateway sends a failed request once more, to another replica. If a stream breaks off, or the
engine ends it without the end of its answer (`stream_end`), the client gets an error event instead
of [DONE]. Any other broken answer is cut off.

The gateway leaves a frozen engine (`RouteTable.frozen`). It retries the request if no byte of the
answer's body has arrived and the request is still kept: at most SMALL_BYTES of it are kept until
then. Otherwise the client gets an error event or 503. An engine that dies is handled in the same
way: its connection closes before the answer, or its answer reports its end (DEATH_NOTICE). A
request that kills its engine therefore kills at most two.

A request counts at its replica until `_release` removes it there, exactly once.

    caller                    method                 in state          next state
    the client's connection   start                  reading           connecting, queued, asked
                              abandon, cancel, stop  any               done
                              pause, resume, sweep   any               the same, or a retry
    `QueueWait`               send_to_replica        queued            connecting, asked
                              refuse, fail           queued            done
    the pool                  send_request           connecting        asked
                              unreachable            connecting        a retry, or done
    the engine's connection   head                   asked             answering
                              first_byte, after head answering         the same, or a retry
                              finish, after head     answering         done
                              only handle_answer     asked             done, or a retry
                              handle_failure         asked, answering  done, or a retry

A retry is connecting, queued or asked. NEXT_STATES has all changes; a test checks that every
request of the tests follows it. These fields are valid only for a time:

    call, content_type, model, started, received    since `start`
    _wait                                           while queued
    replica, counted                                from `send_to_replica` to `_release`
    _dial                                           while connecting
    _upstream                                       since asked, also when done
    _retry_body                                     from asked to the first byte of the answer
    _quiet_since                                    since the first sweep
    trace                                           since its meter set it, if the meter traces
    copied                                          since its meter set it, if the meter copies
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from gateway.errors import Cancelled, FitserveError
from gateway.proxy import refusals
from gateway.proxy.access import rate_limits
from gateway.proxy.access.budgets import TokenCount
from gateway.proxy.api.endpoints import Shape
from gateway.proxy.api.stream_end import stream_end
from gateway.proxy.bodies import request_body
from gateway.proxy.bodies.body_budget import SMALL_BYTES, full_budget_error
from gateway.proxy.client_answer import ClientAnswer
from gateway.proxy.data_plane import DataPlane
from gateway.proxy.engine_request import engine_request
from gateway.proxy.heads import MAX_HOPS, RequestHead, gateway_hops, whole_answer
from gateway.proxy.meter import LEAD_BYTES, UNTOLD, TokenUsage, answer_usage, streamed_usage
from gateway.proxy.queue_wait import QueueWait
from gateway.proxy.routing.call import Call
from gateway.proxy.routing.model_route import RoutedReplica
from gateway.proxy.upload import Upload
from gateway.proxy.upstream_connection import TAIL_BYTES, UpstreamConnection

if TYPE_CHECKING:
    from gateway.proxy.client_connection import ClientConnection
    from gateway.proxy.tracing.traced_metrics import RequestTrace
    from gateway.proxy.transcripts.copying_meter import CopiedRequest

log = logging.getLogger(__name__)

State = Literal["reading", "queued", "connecting", "asked", "answering", "done"]
Outcome = Literal["", "answered", "left", "broken", "cancelled", "refused", "unreachable"]

_UNANSWERED_STATES: tuple[State, ...] = ("connecting", "queued", "asked")
# The states that may follow each state. A retry goes back to one without an answer.
NEXT_STATES: dict[State, tuple[State, ...]] = {
    "reading": (*_UNANSWERED_STATES, "done"),
    "queued": ("connecting", "asked", "done"),
    "connecting": (*_UNANSWERED_STATES, "done"),
    "asked": ("answering", *_UNANSWERED_STATES, "done"),
    "answering": (*_UNANSWERED_STATES, "done"),
    "done": (),
}

# Text of vLLM's answers between the death of its engine core and the end of its server. Source:
# ENGINE_DEAD_MESSAGE (0.18.0 to 0.33.0, v1/engine/exceptions.py).
DEATH_NOTICE = b"EngineCore encountered an issue"
_DYING_STATUS = 500
_UNAUTHORIZED_STATUS = 401
_SERVER_ERROR = 500
_NO_TOKENS = TokenCount()
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[\w-]{1,120})"')


class Exchange:
    """An inference request with its answer.

    `keep_alive`: the connection may serve another request. `call` is read when the request starts;
    `content_type`: the header lines of its body for the engine, and of its trace.
    """

    __slots__ = (
        "_dial",
        "_is_stored",
        "_lead",
        "_quiet_since",
        "_retry_body",
        "_upstream",
        "_usage",
        "_wait",
        "_was_retried",
        "answer",
        "call",
        "connection",
        "content_type",
        "copied",
        "counters",
        "endpoint",
        "first_byte_at",
        "id",
        "keep_alive",
        "key",
        "model",
        "outcome",
        "plane",
        "received_bytes",
        "replica",
        "request_head",
        "started_at",
        "state",
        "trace",
        "upload",
    )

    def __init__(
        self,
        connection: ClientConnection,
        request: RequestHead,
        id_: str,
        *,
        keep_alive: bool,
        body: request_body.Body = b"",
        is_whole: bool = False,
    ) -> None:
        """body: received so far.
        is_whole: all of it was received.
        """
        self.plane: DataPlane = connection.plane
        self.connection = connection
        self.request_head = request
        self.endpoint = request.endpoint
        self.key = request.key
        self.id = id_
        self.keep_alive = keep_alive
        self.upload = Upload(connection, request, body, is_whole)
        self.answer = ClientAnswer(connection, request, id_.encode())
        self.call: Call
        self.content_type: bytes
        self.state: State = "reading"
        self.received_bytes = 0  # bytes of the body when the request started
        self.started_at = self.first_byte_at = 0.0
        self._quiet_since: float
        self.outcome: Outcome = ""
        self.model = ""  # name of a known model
        self.counters: Any = None  # state of the meter
        self.trace: RequestTrace  # of a meter that traces
        self.copied: CopiedRequest  # of a meter that copies
        self.replica: RoutedReplica | None = None
        self._upstream: UpstreamConnection | None = None
        self._usage: TokenUsage | None = None
        self._wait: QueueWait  # while queued
        self._dial: asyncio.Task[None] | None = None
        self._lead = b""  # first bytes of an answer whose usage block may be in two parts
        self._was_retried = False
        self._retry_body: request_body.Body = b""  # the body, while another replica may be asked
        self._is_stored = False  # the engine keeps the response

    # --- read by meters ---

    @property
    def address(self) -> str:
        """The client's address."""
        return self.request_head.address

    @property
    def shape(self) -> Shape:
        """The API that defines the form of errors for the client."""
        return self.endpoint.shape

    @property
    def queued_at(self) -> float | None:
        """Time of the loop at which the present wait for a replica began; None: it is not
        queued."""
        return self._wait.queued_at if self.state == "queued" else None

    @property
    def sent_bytes(self) -> int:
        """Bytes of the answer's body so far."""
        return self._upstream.sent_bytes if self._upstream is not None else 0

    @property
    def tail(self) -> tuple[bytes, ...]:
        """The last pieces of the answer's body."""
        return tuple(self._upstream.tail) if self._upstream is not None else ()

    @property
    def usage(self) -> TokenUsage:
        """The token usage that the answer reports."""
        if self._usage is None:
            upstream = self._upstream
            if upstream is None or not 200 <= self.answer.status < 300:
                self._usage = UNTOLD
            elif self._lead:
                self._usage = streamed_usage(self._lead, upstream.tail)
            else:
                self._usage = answer_usage(upstream.tail)
        return self._usage

    # --- called by the client's connection ---

    def start(self) -> None:
        """Start the request, whose turn has come and of whose body enough is received. Raises
        FitserveError before any engine is asked."""
        plane = self.plane
        endpoint = self.endpoint
        upload = self.upload
        routes = plane.routes
        self.started_at = plane.loop.time()
        form = upload.read_form() if endpoint.body == "form" else None
        body = upload.body
        self.call, route, self.content_type = request_body.read_call(
            endpoint, form, body, routes, self.key
        )
        if self.request_head.priority:
            self.call.priority = self.request_head.priority
        endpoint.check(route.name, route.task)
        if route.toolless:
            request_body.check_tools(endpoint, body, route)
        self.model, self.received_bytes = route.name, len(body)
        unknown_hosts = plane.media_hosts.unresolved_hosts(body) if endpoint.body == "json" else ()
        replica = routes.pick(route, self.call)
        if (
            b"via" in self.request_head.headers
            and gateway_hops(self.request_head.headers) >= MAX_HOPS
            and any(replica.is_remote for replica in route.replicas)
        ):
            raise refusals.loop_error(route.name, MAX_HOPS)
        if self.key.limit is not None:
            self.answer.permit = plane.limiter.admit(
                self.key,
                endpoint.shape,
                self.started_at,
                route.alias_of or route.name,
                asked_bytes=len(body) if endpoint.body == "json" else 0,
                context_tokens=route.card.max_model_len,
            )
        if unknown_hosts:
            self.state = "connecting"
            upload.buffer_body()
            self._dial = plane.loop.create_task(self._check_media(unknown_hosts))
        else:
            self._route_or_queue(replica)

    async def _check_media(self, hosts: Iterable[str]) -> None:
        """Resolve the hosts of the request's media, then route the request. A client that leaves
        cancels it."""
        try:
            await self.plane.media_hosts.check(hosts)
            self._dial = None
            route = self.plane.routes.table.find(self.call.model)
            self._route_or_queue(self.plane.routes.pick(route, self.call))
        except FitserveError as error:
            self._dial = None
            self.refuse(error)
        except Exception:
            log.exception("%s: internal error in the data plane", self.id)
            self._dial = None
            self.fail(refusals.internal_error())

    def list_models(self) -> bytes:
        """The list of models as a request within the limits of its key. Raises FitserveError."""
        plane = self.plane
        if self.key.limit is not None:
            self.answer.permit = plane.limiter.admit(
                self.key, self.endpoint.shape, plane.loop.time()
            )
        body = plane.models_list.body(self.endpoint.id, self.key)
        self.answer.status = 200
        return body

    def limit_headers(self) -> rate_limits.Headers:
        """The remaining quota of the key, as headers of the answer."""
        permit = self.answer.permit
        if permit is None:
            return ()
        return permit.headers(self.plane.loop.time())

    def finish_list(self) -> None:
        """End the request for the list of models."""
        self._finish_request("answered")

    def may_start(self) -> bool:
        """Whether an engine can be asked now, before the body is complete."""
        return self.state == "reading" and self.upload.may_start()

    def takes_more_bytes(self) -> bool:
        """Whether more of the body may come now. Raises Busy."""
        return self.state != "reading" or self.upload.takes_more_bytes()

    def abandon(self) -> None:
        """End the request of a client that closed its connection."""
        if self.state != "done":
            self._drop_engine()
            self._finish_request("left")

    def pause(self) -> None:
        """Read the engine as slowly as the client reads."""
        if self._upstream is not None:
            self._upstream.transport.pause_reading()

    def resume(self) -> None:
        if self._upstream is not None:
            self._upstream.transport.resume_reading()

    def sweep(self, time: float) -> None:
        """End the request after a long silence of its engine. A prefill is silent too. Called
        twice a second."""
        upstream = self._upstream
        if self.state == "queued":
            self._wait.sweep(time)
        elif self.replica is not None and self.replica.id in self.plane.routes.table.frozen:
            self._leave_frozen_replica(self.replica)
        elif upstream is None or upstream.is_active:
            self._quiet_since = time
            if upstream is not None:
                upstream.is_active = False
                if self.state == "answering" and self.replica is not None:
                    self.plane.routes.progress(self.replica)
        elif time - self._quiet_since > self.plane.limits.engine_silence_s:
            self.handle_failure(upstream, "it has been silent for too long")

    def cancel(self) -> None:
        """End the request on behalf of an operator."""
        self.fail(refusals.cancellation_error())

    def stop(self) -> None:
        """End the request because the gateway stops."""
        self.keep_alive = False
        self.fail(refusals.shutdown_error())

    def fail(self, error: FitserveError) -> None:
        """End the request in any state: the engine is released, and the client receives the
        error."""
        self._drop_engine()
        if self.state != "done":
            self.refuse(error)

    # --- choosing an engine ---

    def _route_or_queue(self, replica: RoutedReplica | None, avoid: str | None = None) -> None:
        """Send the request to the replica, or queue it."""
        if replica is not None:
            self.send_to_replica(replica)
        else:
            if self.upload.is_crowded():
                raise full_budget_error()
            self.upload.buffer_body()
            self.state = "queued"
            self._wait = QueueWait(self, avoid)
            self.plane.routes.wait(self._wait)

    def send_to_replica(self, replica: RoutedReplica) -> None:
        plane = self.plane
        plane.routes.start_request(replica, self.call.tokens, self.call.priority)
        self.replica = replica
        plane.meter.count_start(self)
        permit = self.answer.permit
        if permit is not None and permit.charge is not None:
            permit.charge.record_engine_request(plane.routes.load_of(replica.id), plane.loop.time())
        pool = plane.pool(replica.url)
        upstream = pool.acquire()
        if upstream is not None:
            self._send_to_engine(upstream, replica)
        else:
            self.state = "connecting"
            self.upload.buffer_body()
            self._dial = pool.connect(self)

    def send_request(self, upstream: UpstreamConnection) -> None:
        """Write the request to a replica that accepted a connection."""
        self._dial = None
        if self.replica is not None:
            self._send_to_engine(upstream, self.replica)
        else:
            upstream.drop()  # the request ended while the connection was opened

    def _send_to_engine(self, upstream: UpstreamConnection, replica: RoutedReplica) -> None:
        upload = self.upload
        self._upstream = upstream
        self.state = "asked"
        try:
            head, body, renames = engine_request(self, replica, upstream.pool)
        except FitserveError as error:
            self.fail(error)
            return
        if upload.is_whole and not self._was_retried and len(upload.body) <= SMALL_BYTES:
            self._retry_body = upload.body
        upload.body = self.call.body = b""
        upstream.send(self, head, body, renames=renames)
        if self.connection.is_write_paused:
            self.pause()  # the client is still receiving the previous answer
        if upload.is_in_budget or not upload.is_whole or len(body) > SMALL_BYTES:
            upload.stream_to(upstream)

    def pause_upload(self) -> None:
        """Pause the client, because the engine takes the body slowly."""
        self.connection.pause_upload()

    def resume_upload(self) -> None:
        """Resume the client, because the engine took all of the received body."""
        self.upload.record_unsent(0)

    def unreachable(self, error: Exception) -> None:
        """Retry once on another replica. A replica that accepted no connection has not seen the
        request."""
        self._dial = None
        failed_replica = self.replica
        route = self.plane.routes.table.models.get(self.call.model)
        log.warning("%s: no connection to %s: %r", self.id, failed_replica, error)
        is_routed = route is not None and failed_replica in route.replicas
        if (
            failed_replica is not None
            and not self._was_retried
            and (route is None or not is_routed or len(route.replicas) > 1 or route.wait_s)
        ):
            self._retry(failed_replica.id if is_routed else None)
            return
        self.outcome = "unreachable"
        self._release()
        self.refuse(refusals.connection_error())

    def _leave_frozen_replica(self, frozen_replica: RoutedReplica) -> None:
        """Leave a frozen replica, which may never resume."""
        upstream = self._upstream
        if upstream is not None and upstream.is_active:
            upstream.is_active = False  # bytes arrived since the last check, so it may recover
            return
        log.warning("%s: %s is frozen", self.id, frozen_replica)
        answer = self.answer
        answer.forget()
        # The head of a stream may be sent already: it is the same for every replica. The head of
        # another answer is not.
        restartable = not answer.status or (
            answer.has_events and answer.status == 200 and not self.sent_bytes
        )
        body = self._retry_body
        self._retry_body = b""
        self._drop_engine()
        self._dial = None
        if not restartable:
            self.refuse(refusals.frozen_answer_error())
        elif (
            self.upload.is_whole
            and not self._was_retried
            and (body or self.state == "connecting" or self.endpoint.method != "POST")
        ):
            if self.state != "connecting":
                self._restore_body(body)
            self._retry(None)
        else:
            self.refuse(refusals.frozen_engine_error())

    def _retry(self, avoid: str | None) -> None:
        """Send the request to another replica, before any of an answer has come."""
        self._was_retried = True
        self.outcome = "unreachable"
        self._release()
        self._upstream = None
        self.answer.restart()
        try:
            route = self.plane.routes.table.find(self.call.model)
            self._route_or_queue(self.plane.routes.pick(route, self.call, avoid), avoid)
        except FitserveError as refusal:
            self.refuse(refusal)

    def _retry_after_death(self) -> bool:
        """Ask another replica where the engine dies before it answered. Returns whether there is
        one and the request is still in memory."""
        dying = self.replica
        body = self._retry_body
        route = self.plane.routes.table.models.get(self.call.model)
        if (
            dying is None
            or self._was_retried
            or not body
            or route is None
            or all(replica.id == dying.id for replica in route.replicas)
        ):
            return False
        log.warning("%s: %s dies; asking another replica", self.id, dying)
        self._retry_body = b""
        self._drop_engine()
        self._restore_body(body)
        self._retry(dying.id)
        return True

    def _restore_body(self, body: request_body.Body) -> None:
        """Put back the body, which another replica gets."""
        self.call.body = body
        self.upload.restore(body)

    # --- the engine's answer ---

    def head(self, upstream: UpstreamConnection, status: int) -> None:
        """Handle the head of the answer. The client's head is a new one."""
        # Clients disagree on whether an answer of status 205 has a body.
        if not (200 <= status < 300 or 400 <= status < 600) or status == 205:
            self.fail(refusals.status_error(status))
            return
        if status == _UNAUTHORIZED_STATUS:
            self.fail(
                refusals.engine_key_error(
                    has_key=self.replica is not None and self.replica.key is not None
                )
            )
            return
        self.answer.status = status
        if status >= 400:
            self.answer.refused_body = self._retry_body
        self.state = "answering"
        if status == _DYING_STATUS and self._retry_body:
            self.answer.withholds_head = True
        else:
            self.keep_alive = self.answer.start(upstream, keep_alive=self.keep_alive)

    def first_byte(self, data: bytes) -> None:
        plane = self.plane
        if self.answer.withholds_head and self._upstream is not None:
            if DEATH_NOTICE in data and self._retry_after_death():
                return
            self.keep_alive = self.answer.start(self._upstream, keep_alive=self.keep_alive)
        self._retry_body = b""
        self.first_byte_at = plane.loop.time()
        if self.endpoint.name == "messages":
            self._lead = data[:LEAD_BYTES]
        plane.meter.count_first_byte(self)
        if self.replica is not None:
            plane.routes.progress(self.replica)
            if (
                self.call.stores_answer
                and self.answer.status < 300
                and (match := _RESPONSE_ID.search(data, 0, 4096))
            ):
                plane.routes.responses.record(match[1], self.key, self.replica.seed)
                self._is_stored = True

    def finish(self, upstream: UpstreamConnection, *, is_reusable: bool) -> None:
        """End a complete answer."""
        answer = self.answer
        if answer.withholds_head:
            self.keep_alive = answer.start(upstream, keep_alive=self.keep_alive)
        error = 0
        if answer.streams_events and self.endpoint.method == "POST":
            complete, error = stream_end(
                self.endpoint.name,
                upstream.last_pieces(),
                TAIL_BYTES,
                upstream.sent_bytes,
                self.call.choices,
            )
            if not complete:
                log.warning("%s: %s ended its stream early", self.id, self.replica)
                upstream.flush()
                self.fail(refusals.incomplete_stream_error())
                return
        answer.complete(upstream, keep_alive=self.keep_alive)
        outcome: Outcome = "broken" if error >= _SERVER_ERROR else "answered"
        if 0 < error < _SERVER_ERROR:
            answer.status = error  # counted like the refusal that it is
        self._finish_answer(upstream, outcome, is_reusable=is_reusable)

    def _finish_answer(
        self, upstream: UpstreamConnection, outcome: Outcome, *, is_reusable: bool
    ) -> None:
        """Release the engine's connection after the last byte is written."""
        self._finish_request(outcome)
        if is_reusable and self.upload.is_whole and not upstream.transport.get_write_buffer_size():
            upstream.pool.release(upstream)
        else:
            upstream.drop()
        self.connection.finish_turn(self)

    def handle_answer(
        self, upstream: UpstreamConnection, status: int, forwarded_headers: bytes, body: bytes
    ) -> None:
        """Handle a whole answer with a known head, like `head`, `first_byte` and `finish`."""
        if status == _DYING_STATUS and DEATH_NOTICE in body and self._retry_after_death():
            return
        answer = self.answer
        answer.status = status
        if status >= 400:
            answer.refused_body = self._retry_body
        upstream.sent_bytes = len(body)
        if body:
            upstream.tail.append(body[-TAIL_BYTES:])
            self.first_byte(body)
        if status >= 400:
            answer.write_error(body, forwarded_headers, keep_alive=self.keep_alive)
        else:
            answer.writer.write(
                whole_answer(status, forwarded_headers, answer.own_headers(), answer.id, body)
            )
        self._finish_answer(upstream, "answered", is_reusable=True)

    def handle_failure(
        self, upstream: UpstreamConnection, reason: str, *, is_closed: bool = False
    ) -> None:
        """Handle an engine that closed its connection (`is_closed`) or sent something
        unreadable."""
        self.answer.forget()
        if is_closed and not self.answer.status and self._retry_after_death():
            return
        log.warning("%s: %s broke off: %s", self.id, self.replica, reason)
        upstream.flush()
        self.fail(
            refusals.broken_answer_error() if self.answer.status else refusals.engine_end_error()
        )

    # --- ends ---

    def _drop_engine(self) -> None:
        """Drop the engine's connection immediately."""
        if self._dial is not None:
            self._dial.cancel()
        if self._upstream is not None:
            self._upstream.drop()

    def refuse(self, error: FitserveError) -> None:
        """End the request with an error. A started event stream ends with an error event, any
        other started answer is cut off."""
        answer = self.answer
        answer.forget()
        if not answer.has_started:
            self._finish_request("refused")
            self.connection.refuse(self, error)
            return
        if not answer.status:
            self.plane.meter.count_refusal(self, error)
        self.keep_alive = False
        answer.break_off(error, self.tail)
        outcome: Outcome = "cancelled" if isinstance(error, Cancelled) else "broken"
        self._finish_request(outcome if answer.status else "refused")
        self.connection.finish_turn(self)

    def _finish_request(self, outcome: Outcome) -> None:
        if self.state == "queued":
            self.plane.routes.forget(self._wait)
        self.outcome = outcome
        permit = self.answer.permit
        count = self._count_end(permit)
        self.state = "done"
        if self.upload.is_in_budget:
            self.upload.release_body()
        if permit is not None:
            self._settle(permit, count)
        self._release()

    def _settle(self, permit: rate_limits.Permit, count: TokenCount) -> None:
        """Count the request for its key, while it is counted at its replica."""
        now = self.plane.loop.time()
        replica = self.replica
        if permit.charge is not None and replica is not None:
            permit.charge.leave(replica.gpus, self.plane.routes.load_of(replica.id), now)
        permit.finish(count, now, has_reached_engine=self._upstream is not None)

    def _count_end(self, permit: rate_limits.Permit | None) -> TokenCount:
        """Count the end, and return the tokens that the request costs its key. An error in
        reading an engine's figures ends no request, and keeps no connection."""
        try:
            if self.state != "reading":
                self.plane.meter.count_completion(self)
            return _NO_TOKENS if permit is None else self._cost_tokens(permit)
        except Exception:
            log.exception("%s: internal error in counting the request", self.id)
            return _NO_TOKENS

    def _cost_tokens(self, permit: rate_limits.Permit) -> TokenCount:
        """The tokens that the request costs its key."""
        prompt, completion, cached_tokens = self.usage
        limit = permit.estimate_limit
        if prompt is not None or limit == 0:
            return TokenCount(prompt or 0, completion or 0, cached_tokens or 0)
        has_reached_engine = (
            self._upstream is not None
            and self.endpoint.body == "json"
            and self.answer.status < 300
            and self.outcome != "refused"
        )
        if not has_reached_engine:
            return TokenCount(0, completion or 0)
        prompt_tokens = rate_limits.estimate(self.received_bytes, 0, is_stream=False, limit=limit)
        if completion is None:
            # The most holds for both.
            completion = rate_limits.estimate(
                0,
                self.sent_bytes,
                is_stream=self.answer.has_events,
                limit=limit - prompt_tokens,
            )
        return TokenCount(prompt_tokens, completion)

    def _release(self) -> None:
        """End the request's work at its replica."""
        if self.replica is not None:
            if self._is_stored:
                self.plane.routes.responses.add(
                    self.replica.seed,
                    self.received_bytes,
                    self.sent_bytes,
                    is_stream=self.answer.has_events,
                )
            self.plane.meter.count_end(self)
            self.plane.routes.finish_request(self.replica, self.call.tokens, self.call.priority)
            self.replica = None
