"""The admin API of requests in flight: list them, and end one."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import Field

from gateway.domain import Value
from gateway.errors import NotFound
from gateway.proxy.api.error_bodies import errors
from gateway.proxy.routing.in_flight import RequestsInFlight
from gateway.server.gateway_parts import gateway_of

router = APIRouter(prefix="/admin/requests", tags=["admin"])


class EndedRequest(Value):
    cancelled: int = Field(description="how many requests had this id")


@router.get("")
async def requests(request: Request) -> RequestsInFlight:
    """The oldest 50 inference requests in flight of all workers: key, model and progress of
    each."""
    in_flight = gateway_of(request).in_flight
    return await in_flight.requests()


@router.delete("/{id:path}", responses=errors(NotFound))
async def cancel(request: Request, id: str) -> EndedRequest:  # noqa: A002 - the name in the path
    """End every request in flight with this id. The engine of a request is released immediately,
    and its client gets an error (403, `cancelled`), in a stream as an event."""
    in_flight = gateway_of(request).in_flight
    cancelled = await in_flight.cancel(id)
    if not cancelled:
        raise NotFound(
            "No request with this id is in flight.",
            hint="It may have ended. GET /admin/requests lists the requests in flight.",
        )
    return EndedRequest(cancelled=cancelled)
