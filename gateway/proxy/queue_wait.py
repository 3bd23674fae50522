"""The wait of a request for a replica: its limits, and comments to a streaming client.

A streaming client receives a comment every `Limits.waiting_comment_s`, so that neither the client
nor a proxy takes the silence for an end. The first comment follows the head of the answer, so the
status is 200 from then on. A later error is an event of the stream.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gateway.errors import FitserveError
from gateway.proxy import refusals
from gateway.proxy.routing.model_route import RoutedReplica

if TYPE_CHECKING:
    from gateway.proxy.exchange import Exchange

log = logging.getLogger(__name__)

_COMMENT = b": waiting\n\n"
# Endpoints whose answers with `"stream": true` are events.
_STREAM_ENDPOINTS = frozenset({"chat", "completions", "responses", "messages"})


class QueueWait:
    """The wait of an exchange in the queue of its model.

    avoid: a replica that took no connection.
    queued_at: time of the loop at its begin.
    """

    def __init__(self, exchange: Exchange, avoid: str | None) -> None:
        self.call = exchange.call
        self.caller = exchange.key.name
        self.avoid = avoid
        self._exchange = exchange
        self.queued_at = exchange.plane.loop.time()
        self._waiting_since = self._commented_at = self.queued_at
        self._state = ""  # "ready" or "away", as at the last look; "" before the first

    def go(self, replica: RoutedReplica) -> None:
        try:
            self._exchange.send_to_replica(replica)
        except Exception:
            log.exception("%s: internal error in the data plane", self._exchange.id)
            self._exchange.fail(refusals.internal_error())

    def reject(self, error: FitserveError) -> None:
        self._exchange.refuse(error)

    def sweep(self, time: float) -> None:
        """End a wait that is too long, and send comments. Called twice a second."""
        plane = self._exchange.plane
        route = plane.routes.table.models.get(self.call.model)
        if route is None:
            return  # `Routes` refuses it shortly
        ready = any(replica.id != self.avoid for replica in route.replicas)
        state = "ready" if ready else "away"
        if state != self._state:
            if self._state:
                self._waiting_since = time
            self._state = state
        if time - self._waiting_since >= (plane.limits.queue_timeout_s if ready else route.wait_s):
            reason = f"this request has waited for {time - self._waiting_since:.0f} s"
            self.reject(
                plane.routes.queue_error(route, reason) if ready else route.not_ready_error()
            )
        elif self._streams and time - self._commented_at >= plane.limits.waiting_comment_s > 0:
            self._commented_at = time
            exchange = self._exchange
            exchange.keep_alive = exchange.answer.write_comment(
                _COMMENT, keep_alive=exchange.keep_alive
            )

    @property
    def _streams(self) -> bool:
        return self.call.is_stream and self._exchange.endpoint.name in _STREAM_ENDPOINTS
