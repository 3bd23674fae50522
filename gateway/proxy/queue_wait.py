"""One request's wait for a replica: how long it may be, and what its client hears meanwhile.

A client that asked for a stream hears a comment every `Limits.waiting_comment_s`, so that neither
it nor a proxy before it takes the silence for an end. The first comment brings the head of the
answer along, so from then on the status is 200: an error afterwards, the gateway's or the engine's,
is an event of the stream.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gateway.errors import FitserveError
from gateway.proxy import refusals
from gateway.proxy.heads import answer_head
from gateway.proxy.routing.table import RoutedReplica

if TYPE_CHECKING:
    from gateway.proxy.exchange import Exchange

log = logging.getLogger(__name__)

_COMMENT = b": waiting\n\n"
_STREAMS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
# Endpoints whose answers with `"stream": true` are events.
_STREAMED = frozenset({"chat", "completions", "responses", "messages"})


class QueueWait:
    """The wait of an exchange in the queue of its model. `avoid`: the replica that
    took no connection."""

    def __init__(self, exchange: Exchange, avoid: str | None) -> None:
        self.call = exchange.call
        self.avoid = avoid
        self._exchange = exchange
        self._since = self._told = exchange.plane.loop.time()
        self._ready: bool | None = None

    def go(self, replica: RoutedReplica) -> None:
        try:
            self._exchange.ask(replica)
        except Exception:
            log.exception("%s: a bug in the data plane", self._exchange.id)
            self._exchange.fail(refusals.failed())

    def give_up(self, error: FitserveError) -> None:
        self._exchange.refuse(error)

    def sweep(self, now: float) -> None:
        """Twice a second."""
        plane = self._exchange.plane
        route = plane.routes.table.models.get(self.call.model)
        if route is None:
            return  # `Routes` is about to say so
        ready = any(replica.id != self.avoid for replica in route.replicas)
        if ready is not self._ready:
            self._ready, self._since = ready, now if self._ready is not None else self._since
        if now - self._since >= (plane.limits.queue_timeout_s if ready else route.wait_s):
            why = f"this request has waited for {now - self._since:.0f} s"
            self.give_up(plane.routes.refusal(route, why) if ready else route.not_ready())
        elif self._streams and now - self._told >= plane.limits.waiting_comment_s > 0:
            self._told = now
            self._tell()

    @property
    def _streams(self) -> bool:
        return self.call.streams and self._exchange.endpoint.name in _STREAMED

    def _tell(self) -> None:
        exchange = self._exchange
        if not exchange.promised:
            own = exchange.own_headers()
            head = answer_head(
                200,
                _STREAMS,
                None,
                own,
                exchange.id.encode(),
                chunks=exchange.chunks,
                keep=exchange.keep,
                source=b"gateway",
            )
            exchange.promised, exchange.events, exchange.keep = True, True, head.keep
            exchange.client.write(head.data)
        exchange.client.write(
            b"%x\r\n%b\r\n" % (len(_COMMENT), _COMMENT) if exchange.chunks else _COMMENT
        )
