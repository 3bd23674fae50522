"""Requests in flight: those with a known model whose answer is not complete. Computed on demand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import TYPE_CHECKING, Literal, Protocol

from gateway.keys import class_name
from gateway.proxy.routing.route_table import RouteTable

if TYPE_CHECKING:
    from gateway.proxy.exchange import Exchange

# Most requests shown, the oldest first.
MAX_SHOWN_REQUESTS = 50

Phase = Literal[
    "waiting for the model", "waiting for a place", "waiting for the first token", "answering"
]


def _described_field(text: str) -> dict[str, str]:
    """Metadata of a field with its description for the API. Not pydantic's `Field`: workers do
    without pydantic, which saves 10 MiB each."""
    return {"description": text}


@dataclass(frozen=True, slots=True)
class RequestInFlight:
    """A request in flight, without prompt, answer or key."""

    id: str = field(
        metadata=_described_field("the `x-request-id` of its answer, which the client may choose")
    )
    model: str
    endpoint: str = field(
        metadata=_described_field("name as in metrics: chat, completions, embeddings, ...")
    )
    key: str = field(metadata=_described_field("name of the key; empty: no key"))
    address: str = field(
        metadata=_described_field("address of the client, or of a proxy before the gateway")
    )
    phase: Phase
    replica: str | None = field(
        metadata=_described_field("the engine that has the request; null: none yet")
    )
    began_at: float = field(metadata=_described_field("Unix time"))
    first_byte_s: float | None = field(
        metadata=_described_field("seconds to the first byte of the answer; null: none yet")
    )
    received_bytes: int = field(
        metadata=_described_field("bytes of the request's body when it was routed")
    )
    sent_bytes: int = field(metadata=_described_field("bytes of the answer's body so far"))


@dataclass(frozen=True, slots=True)
class WaitingClass:
    """The waiting requests of one class for one model."""

    model: str
    priority: int = field(
        metadata=_described_field("number of the class; a smaller one goes first")
    )
    priority_class: str = field(metadata=_described_field("name of the class, or its number"))
    requests: int
    oldest_at: float = field(metadata=_described_field("Unix time of the oldest one's beginning"))


@dataclass(frozen=True, slots=True)
class RequestsInFlight:
    """The oldest requests in flight, oldest first."""

    data: tuple[RequestInFlight, ...]
    more: int = field(metadata=_described_field("requests in flight that are not listed"))
    waiting: tuple[WaitingClass, ...] = field(
        default=(), metadata=_described_field("all waiting requests, by model and class")
    )


class InFlightSource(Protocol):
    """Source of requests in flight: the data plane of this process, or the workers."""

    async def requests(self) -> RequestsInFlight:
        """The requests in flight of all processes."""

    async def cancel(self, id_: str) -> int:
        """End the requests with this id. The number of such requests."""


def oldest(exchanges: Iterable[Exchange], table: RouteTable, clock_lead: float) -> RequestsInFlight:
    """The oldest of the exchanges. `clock_lead`: seconds by which Unix time is ahead of the loop's
    clock."""
    requests = [
        exchange
        for exchange in exchanges
        if exchange.model and exchange.state not in ("reading", "done")
    ]
    return RequestsInFlight(
        tuple(
            _exchange_row(exchange, table, clock_lead)
            for exchange in nsmallest(
                MAX_SHOWN_REQUESTS, requests, key=lambda exchange: exchange.started_at
            )
        ),
        max(0, len(requests) - MAX_SHOWN_REQUESTS),
        _sum_classes(
            WaitingClass(
                exchange.model,
                exchange.call.priority,
                class_name(exchange.call.priority),
                1,
                round(exchange.started_at + clock_lead, 1),
            )
            for exchange in requests
            if exchange.state == "queued"
        ),
    )


def merge(processes: Iterable[RequestsInFlight]) -> RequestsInFlight:
    """The requests in flight of several processes as one list."""
    parts = list(processes)
    rows = sorted((row for part in parts for row in part.data), key=lambda row: row.began_at)
    return RequestsInFlight(
        tuple(rows[:MAX_SHOWN_REQUESTS]),
        max(0, len(rows) - MAX_SHOWN_REQUESTS) + sum(part.more for part in parts),
        _sum_classes(row for part in parts for row in part.waiting),
    )


def _sum_classes(rows: Iterable[WaitingClass]) -> tuple[WaitingClass, ...]:
    """One row of each model and class, in the order of both."""
    sums: dict[tuple[str, int], tuple[int, float]] = {}
    for row in rows:
        count, oldest_at = sums.get((row.model, row.priority), (0, math.inf))
        sums[row.model, row.priority] = count + row.requests, min(oldest_at, row.oldest_at)
    return tuple(
        WaitingClass(model, priority, class_name(priority), *sums[model, priority])
        for model, priority in sorted(sums)
    )


def _exchange_row(exchange: Exchange, table: RouteTable, clock_lead: float) -> RequestInFlight:
    return RequestInFlight(
        id=exchange.id,
        model=exchange.model,
        endpoint=exchange.endpoint.name,
        key=exchange.key.name,
        address=exchange.address,
        phase=_phase_of(exchange, table),
        replica=exchange.replica.id if exchange.replica is not None else None,
        began_at=round(exchange.started_at + clock_lead, 1),
        first_byte_s=round(exchange.first_byte_at - exchange.started_at, 3)
        if exchange.first_byte_at
        else None,
        received_bytes=exchange.received_bytes,
        sent_bytes=exchange.sent_bytes,
    )


def _phase_of(exchange: Exchange, table: RouteTable) -> Phase:
    if exchange.state == "queued":
        route = table.models.get(exchange.model)
        return (
            "waiting for a place"
            if route is not None and route.replicas
            else "waiting for the model"
        )
    return "answering" if exchange.first_byte_at else "waiting for the first token"
