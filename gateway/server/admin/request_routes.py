"""The admin API of requests in flight: which there are, and the end of one."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import Field

from gateway.domain import Value
from gateway.errors import NotFound
from gateway.proxy.api.error_bodies import errors
from gateway.proxy.routing.in_flight import InFlight, RequestsInFlight

router = APIRouter(prefix="/admin/requests", tags=["admin"])


class Ended(Value):
    cancelled: int = Field(description="how many requests had this id")


@router.get("")
async def requests(request: Request) -> RequestsInFlight:
    """The oldest 50 of the inference requests that are in flight, of all workers: who asks which
    model, and how far each is."""
    in_flight: InFlight = request.app.state.in_flight
    return await in_flight.requests()


@router.delete("/{id:path}", responses=errors(NotFound))
async def cancel(request: Request, id: str) -> Ended:  # noqa: A002 - the name in the path
    """End every request in flight with this id: its engine is let go of at once, and its client
    gets an error (403, `cancelled`), in a stream as an event."""
    in_flight: InFlight = request.app.state.in_flight
    cancelled = await in_flight.cancel(id)
    if not cancelled:
        raise NotFound(
            "No request with this id is in flight.",
            hint="It may have ended. GET /admin/requests lists those that are.",
        )
    return Ended(cancelled=cancelled)
