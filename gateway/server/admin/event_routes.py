"""The admin API of events, as a resumable stream of server-sent events or as a list."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import Field

from gateway.controller.events.event_log import EventLog
from gateway.domain import Value
from gateway.domain.facts import Event
from gateway.server.gateway_parts import gateway_of

router = APIRouter(prefix="/admin/events", tags=["admin"])

# Keeps proxies from closing a stream without events.
_COMMENT_S = 15.0
# Milliseconds after which a browser reconnects to an ended stream.
_RETRY_MS = 2000
_MAX_EVENTS = 1000


class EventList(Value):
    data: tuple[Event, ...]
    oldest: int = Field(description="the number of the oldest stored event")
    newest: int = Field(
        description="the number of the newest event; pass it as `after` to get later events"
    )


@router.get(
    "",
    response_model=EventList,
    responses={200: {"content": {"text/event-stream": {}}, "description": "A stream, or a list"}},
)
async def events(
    request: Request,
    model: Annotated[
        str | None, Query(max_length=200, description="only events of this model")
    ] = None,
    after: Annotated[
        int | None,
        Query(
            ge=0,
            le=2**53,
            description="begin after the event of this number; 0: with the oldest stored event",
        ),
    ] = None,
    last: Annotated[
        int | None,
        Query(ge=1, le=_MAX_EVENTS, description="number of earlier events to begin with"),
    ] = None,
    follow: Annotated[bool, Query(description="false: the present events as a JSON list")] = True,
    last_event_id: Annotated[
        str | None, Header(description="like `after`, sent by a reconnecting client")
    ] = None,
) -> StreamingResponse | EventList:
    """Events as server-sent events with JSON data, from now on or after the event of a number. If
    following events are no longer stored, an event `resync` says so and the stream continues with
    the next; read the state again in that case."""
    log = gateway_of(request).events
    if (
        last_event_id is not None
        and last_event_id.isascii()
        and last_event_id.isdigit()
        and len(last_event_id) <= 16
    ):
        after = int(last_event_id)
    if not follow:
        bounds = await log.bounds()
        listed_events = await (
            log.last(last or _MAX_EVENTS, model)
            if after is None
            else log.next(after, last or _MAX_EVENTS, model)
        )
        return EventList(data=tuple(listed_events), oldest=bounds.oldest, newest=bounds.newest)
    earlier_events = await log.last(last, model) if last is not None and after is None else []
    number = earlier_events[-1].id if earlier_events else log.newest_number
    number = after if after is not None else number
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(
        stream(log, earlier_events, number, model), media_type="text/event-stream", headers=headers
    )


async def stream(
    log: EventLog, earlier_events: list[Event], number: int, model: str | None
) -> AsyncIterator[bytes]:
    """`earlier_events`, then the events after `number`, until the gateway stops."""
    yield b"retry: %d\n\n" % _RETRY_MS + b"".join(
        _event_frame(event.id, event.model_dump_json().encode()) for event in earlier_events
    )
    while True:
        batch = await log.events_after(number, model)
        has_moved = batch.number != number
        number = batch.number
        if batch.has_gap:
            yield b'id: %d\nevent: resync\ndata: {"newest":%d}\n\n' % (number, number)
        elif batch.events:
            yield b"".join([_event_frame(event.number, event.text) for event in batch.events])
        elif not has_moved:
            if log.is_over(number):
                return
            if not await log.wait_for_events(_COMMENT_S):
                yield b": still here\n\n"


def _event_frame(number: int, text: bytes) -> bytes:
    return b"id: %d\ndata: %b\n\n" % (number, text)
