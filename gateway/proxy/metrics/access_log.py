"""The access log: one JSON line per finished request of inference (`AccessLog`) or the admin API
(`AdminRequest`).

Lines go to standard error, without prompts, answers, queries and keys; they have the name of the
key. A path of the admin API is logged as its route. The path itself is added only where the request
succeeded: an unknown path may contain anything, even a misplaced key.
"""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.types import Message, Scope, Send

from gateway.errors import FitserveError
from gateway.proxy.access.scopes import Scopes
from gateway.proxy.api.protocol import request_id
from gateway.proxy.metrics.counters import Metrics
from gateway.visible import visible

if TYPE_CHECKING:
    from gateway.proxy.exchange import Exchange


class AccessLog(Metrics):
    """Metrics that also log each request."""

    def count_refusal(self, exchange: Exchange, error: FitserveError) -> None:
        super().count_refusal(exchange, error)
        self._log_exchange(exchange, error.status, "refused", error.code)

    def count_rejection(self, error: FitserveError, id_: str, address: str) -> None:
        super().count_rejection(error, id_, address)
        _write_event(
            "request",
            {
                "id": id_,
                "address": address,
                "status": error.status,
                "outcome": "refused",
                "code": error.code,
            },
        )

    def count_completion(self, exchange: Exchange) -> None:
        super().count_completion(exchange)
        if exchange.outcome != "refused":
            self._log_exchange(exchange, exchange.answer.status, exchange.outcome, None)

    def _log_exchange(
        self, exchange: Exchange, status: int, outcome: str, code: str | None
    ) -> None:
        """Write the line of an ended request."""
        started_at = exchange.started_at
        first = exchange.first_byte_at
        prompt, completion, _ = exchange.usage
        _write_event(
            "request",
            {
                "id": exchange.id,
                "address": exchange.address,
                "key": exchange.key.name,
                "endpoint": exchange.endpoint.name,
                "model": exchange.model,
                "replica": exchange.replica.id if exchange.replica is not None else None,
                "status": status,
                "outcome": outcome,
                "code": code,
                "stream": exchange.answer.has_events,
                "duration_s": round(exchange.plane.loop.time() - started_at, 6)
                if started_at
                else None,
                "first_byte_s": round(first - started_at, 6) if first else None,
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "received_bytes": exchange.received_bytes,
                "sent_bytes": exchange.sent_bytes,
            },
        )


class AdminRequest:
    """A request to the application. `send` replaces the original send. The client's address is
    written into the scope as `address`, and the key's name as `key` once the request is
    admitted."""

    def __init__(self, scope: Scope, send: Send, scopes: Scopes) -> None:
        self._scope = scope
        self._send = send
        _, self._route = scopes.find(scope)
        self._start_s = time.monotonic()
        self._status: int | None = None
        self._sent_bytes = 0
        self._id = request_id(scope)
        # The id is fixed in the headers, so that an error answer has the same id.
        scope["headers"] = [(b"x-request-id", self._id.encode()), *scope["headers"]]

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        else:
            self._sent_bytes += len(message.get("body", b""))
        await self._send(message)

    def log(self) -> None:
        """Log the end of the request. The status is empty if its client left before the answer."""
        has_succeeded = self._status is not None and self._status < 400
        _write_event(
            "admin",
            {
                "id": self._id,
                "address": self._scope.get("address", ""),
                "key": self._scope.get("key"),
                "method": self._scope["method"],
                "route": self._route,
                "path": self._scope["path"] if has_succeeded else None,
                "status": self._status,
                "duration_s": round(time.monotonic() - self._start_s, 6),
                "sent_bytes": self._sent_bytes,
            },
        )


def _write_event(event: str, fields: dict[str, Any]) -> None:
    line = {"event": event, "timestamp": datetime.now(UTC).isoformat(), **fields}
    sys.stderr.write(visible(msgspec.json.encode(line).decode()) + "\n")
    sys.stderr.flush()
