"""The access log: one line of JSON per inference request on standard error, as it ends. Never a prompt, an answer or a key; a key's name."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.serve.metrics import Metrics

if TYPE_CHECKING:
    from gateway.errors import FitserveError
    from gateway.serve.answer import Answer


class AccessLog(Metrics):
    """Metrics that are told one by one too."""

    def refused(self, exchange: Answer, error: FitserveError) -> None:
        super().refused(exchange, error)
        self._tell(exchange, error.status, "refused", error.code)

    def turned_away(self, error: FitserveError, id_: str, address: str) -> None:
        super().turned_away(error, id_, address)
        _write({"id": id_, "address": address, "status": error.status, "outcome": "refused", "code": error.code})

    def finished(self, exchange: Answer) -> None:
        super().finished(exchange)
        if exchange.outcome != "refused":
            self._tell(exchange, exchange.status, exchange.outcome, None)

    def _tell(self, exchange: Answer, status: int, outcome: str, code: str | None) -> None:
        started, first = exchange.started, exchange.first_byte_at
        prompt, completion = exchange.usage
        _write(
            {
                "id": exchange.id,
                "address": exchange.front.client[0] if exchange.front.client else "",
                "key": exchange.key.name,
                "endpoint": exchange.endpoint.name,
                "model": exchange.model,
                "replica": exchange.replica.id if exchange.replica is not None else None,
                "status": status,
                "outcome": outcome,
                "code": code,
                "stream": exchange.events,
                "duration_s": round(exchange.front.plane.loop.time() - started, 6) if started else None,
                "first_byte_s": round(first - started, 6) if first else None,
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "received_bytes": exchange.received,
                "sent_bytes": exchange.sent,
            }
        )


def _write(fields: dict[str, Any]) -> None:
    line = {"event": "request", "timestamp": datetime.now(UTC).isoformat(), **fields}
    sys.stderr.write(msgspec.json.encode(line).decode() + "\n")
    sys.stderr.flush()
