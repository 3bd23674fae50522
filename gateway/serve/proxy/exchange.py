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

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.errors import EngineUnreachable, FitserveError, NotReady
from gateway.routing.routes import Replica
from gateway.serve.proxy import bodies
from gateway.serve.proxy.answer import Answer
from gateway.serve.proxy.heads import request_head
from gateway.serve.proxy.wait import Wait

if TYPE_CHECKING:
    from gateway.serve.proxy.upstream_connection import Link

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Exchange(Answer):
    """One request, and what has become of it."""

    # --- the front's side ---

    def start(self) -> None:
        """Its turn has come, and enough of the body is here. Raises FitserveError as long as no engine was asked."""
        plane = self.front.plane
        self.client = self.front.transport
        self.started = plane.loop.time()
        content_type = self.found.get(b"content-type")
        self.call, route, self._content_type = bodies.read_call(self.endpoint, content_type, self.body, plane.routes, self.key)
        self.endpoint.check(route.name, route.task)
        self.model, self.received = route.name, len(self.body)
        replica = plane.routes.pick(route, self.call)
        if self.key.limit is not None:
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
        link = self._link
        if self.state == "queued" and self._wait is not None:
            self._wait.sweep(now)
        elif link is None or link.heard:
            self._quiet_since = now
            if link is not None:
                link.heard = False
                if self.state == "answering" and self.replica is not None:
                    self.front.plane.routes.progress(self.replica)
        elif now - self._quiet_since > self.front.plane.limits.engine_silence_s:
            self.broke(link, "it has been silent for too long")

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
        body = self.body
        if self.replica is not None and self.replica.served_name != self.call.model:
            body = bodies.renamed(self.endpoint, self.found.get(b"content-type"), body, self.replica.served_name)
        described = self._content_type
        if self.whole:
            if self.endpoint.method == "POST":
                described += b"content-length: %d\r\n" % len(body)
        elif (announced := self.found.get(b"content-length")) is not None:
            described += b"content-length: %d\r\n" % (int(announced) + len(body) - len(self.body))
        else:
            described += b"transfer-encoding: chunked\r\n"
            body = b"%x\r\n%b\r\n" % (len(body), bytes(body))
        head = request_head(self.endpoint, link.pool.prefix, link.pool.authority, self.id.encode(), described, self.lines)
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
