"""Which requests are in flight: those that have named a model and are not answered to the end.
Looked at when somebody asks; nothing is kept of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import TYPE_CHECKING, Literal, Protocol

from gateway.proxy.routing.table import RouteTable

if TYPE_CHECKING:
    from gateway.proxy.exchange import Exchange

# Requests that are shown; the oldest are what somebody looks for.
MOST_SHOWN = 50

Phase = Literal[
    "waiting for the model", "waiting for a place", "waiting for the first token", "answering"
]


def _means(words: str) -> dict[str, str]:
    """Metadata of a field, from which the description of the API has its meaning. No `Field`:
    workers do without pydantic, 10 MiB each."""
    return {"description": words}


@dataclass(frozen=True, slots=True)
class RequestInFlight:
    """One of them. Never a prompt, an answer or a key."""

    id: str = field(
        metadata=_means("as its answer's `x-request-id`, which its client may have chosen")
    )
    model: str
    endpoint: str = field(metadata=_means("as in metrics: chat, completions, embeddings, ..."))
    key: str = field(metadata=_means("the name of the key; empty: without one"))
    address: str = field(metadata=_means("of the client, or of the proxy before it"))
    phase: Phase
    replica: str | None = field(metadata=_means("the engine that was asked; null: none yet"))
    began_at: float = field(metadata=_means("Unix time"))
    first_byte_s: float | None = field(
        metadata=_means("seconds to the first byte of the answer; null: none yet")
    )
    received_bytes: int = field(metadata=_means("of the request's body, when it was routed"))
    sent_bytes: int = field(metadata=_means("of the answer's body so far"))


@dataclass(frozen=True, slots=True)
class RequestsInFlight:
    """The oldest requests in flight, oldest first."""

    data: tuple[RequestInFlight, ...]
    more: int = field(metadata=_means("requests in flight that are not listed"))


class InFlight(Protocol):
    """Where requests in flight are known: the data plane of this process, or the workers."""

    async def requests(self) -> RequestsInFlight:
        """Those of all processes."""

    async def cancel(self, id_: str) -> int:
        """Ends the requests with this id, and says how many there were."""


def oldest(asks: Iterable[Exchange], table: RouteTable, ahead: float) -> RequestsInFlight:
    """ahead: seconds by which Unix time is ahead of the loop's clock."""
    found = [ask for ask in asks if ask.model and ask.state not in ("reading", "done")]
    return RequestsInFlight(
        tuple(
            _row(ask, table, ahead)
            for ask in nsmallest(MOST_SHOWN, found, key=lambda ask: ask.started)
        ),
        max(0, len(found) - MOST_SHOWN),
    )


def together(found: Iterable[RequestsInFlight]) -> RequestsInFlight:
    """Of several processes."""
    parts = list(found)
    rows = sorted((row for part in parts for row in part.data), key=lambda row: row.began_at)
    return RequestsInFlight(
        tuple(rows[:MOST_SHOWN]), max(0, len(rows) - MOST_SHOWN) + sum(part.more for part in parts)
    )


def _row(ask: Exchange, table: RouteTable, ahead: float) -> RequestInFlight:
    return RequestInFlight(
        id=ask.id,
        model=ask.model,
        endpoint=ask.endpoint.name,
        key=ask.key.name,
        address=ask.address,
        phase=_phase(ask, table),
        replica=ask.replica.id if ask.replica is not None else None,
        began_at=round(ask.started + ahead, 1),
        first_byte_s=round(ask.first_byte_at - ask.started, 3) if ask.first_byte_at else None,
        received_bytes=ask.received,
        sent_bytes=ask.sent,
    )


def _phase(ask: Exchange, table: RouteTable) -> Phase:
    if ask.state == "queued":
        route = table.models.get(ask.model)
        return (
            "waiting for a place"
            if route is not None and route.replicas
            else "waiting for the model"
        )
    return "answering" if ask.first_byte_at else "waiting for the first token"
