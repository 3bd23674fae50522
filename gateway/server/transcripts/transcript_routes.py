"""The admin API of transcripts. Each reading of a text is an event with the reader's name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import Field

from gateway.domain import Value
from gateway.domain.facts import Event, EventKind
from gateway.errors import BadRequest, NotFound, NotReady, UpstreamError
from gateway.proxy.api.error_bodies import errors
from gateway.server.gateway_parts import Gateway, gateway_of
from gateway.server.transcripts.archive import TranscriptQuery
from gateway.server.transcripts.replays import NewReplay, ReplayView
from gateway.server.transcripts.transcript_views import (
    TranscriptList,
    TranscriptRow,
    TranscriptView,
)
from gateway.server.transcripts.transcripts import Transcripts

router = APIRouter(prefix="/admin/transcripts", tags=["transcripts"])

_OFF_HINT = "Set FITSERVE_TRANSCRIPT_KEY_FILE and restart: docs/transcripts.md has the steps."


class TranscriptState(Value):
    """Whether transcripts are kept, and whose."""

    is_on: bool = Field(description="whether a key file is set, so that requests can be recorded")
    models: tuple[str, ...] = Field((), description="models recorded for all keys; `*`: every one")
    keys: tuple[str, ...] = Field((), description="recorded keys")
    problem: str = Field("", description="why nothing is written; empty: all is well")
    written_count: int = 0
    dropped_count: int = 0
    bytes_used: int = 0


class DeletedTranscripts(Value):
    bytes_freed: int


def transcripts_of(gateway: Gateway) -> Transcripts:
    """The transcripts of the gateway. Raises NotFound where none are kept."""
    if gateway.serving.transcripts is None:
        raise NotFound("This gateway keeps no transcripts.", hint=_OFF_HINT)
    return gateway.serving.transcripts


def _query(
    search: Annotated[str, Query(max_length=200, description="text of request or answer")] = "",
    model: Annotated[str, Query(max_length=200)] = "",
    key: Annotated[str, Query(max_length=200)] = "",
    request_id: Annotated[str, Query(max_length=200, description="value of x-request-id")] = "",
) -> TranscriptQuery:
    return TranscriptQuery(search, model, key, request_id)


@router.get("/state")
async def state(request: Request) -> TranscriptState:
    """Whose requests are recorded now."""
    gateway = gateway_of(request)
    return await asyncio.to_thread(transcript_state, gateway)


def transcript_state(gateway: Gateway) -> TranscriptState:
    transcripts = gateway.serving.transcripts
    keys = tuple(key.grant.name for key in gateway.keyring.stored_keys if key.grant.is_recorded)
    if transcripts is None:
        return TranscriptState(is_on=False, keys=keys)
    keeper = transcripts.keeper
    return TranscriptState(
        is_on=True,
        models=tuple(sorted(transcripts.setup.models)),
        keys=keys,
        problem=keeper.problem,
        written_count=keeper.written_count,
        dropped_count=keeper.dropped_count,
        bytes_used=transcripts.archive.size,
    )


@router.get("", responses=errors(NotFound, BadRequest))
async def list_transcripts(
    request: Request,
    query: Annotated[TranscriptQuery, Depends(_query)],
    last_id: str | None = Query(
        None, max_length=100, description="the last id of the answer before"
    ),
    limit: int = Query(50, ge=1, le=200),
) -> TranscriptList:
    """The newest transcripts that fit, without their texts. A search ends after 32 MiB, and its
    answer says where to go on."""
    gateway = gateway_of(request)
    archive = transcripts_of(gateway).archive
    listing = await asyncio.to_thread(archive.page, query, last_id, limit)
    _report(request, "transcripts.read", f"listed {len(listing.data)} transcripts")
    return listing


@router.get("/export", response_class=StreamingResponse, responses=errors(NotFound))
async def export(
    request: Request, query: Annotated[TranscriptQuery, Depends(_query)]
) -> StreamingResponse:
    """All transcripts that fit as lines of JSON, the newest first."""
    archive = transcripts_of(gateway_of(request)).archive
    _report(request, "transcripts.read", "exported transcripts")

    def lines() -> Iterator[bytes]:
        for view in archive.views(query):
            yield msgspec.json.encode(view.model_dump(mode="json")) + b"\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


@router.get("/{id}", responses=errors(NotFound, BadRequest))
async def show(request: Request, id: str) -> TranscriptView:  # noqa: A002 - the name in the path
    """A transcript with its texts."""
    archive = transcripts_of(gateway_of(request)).archive
    view = await asyncio.to_thread(archive.find, id)
    _report(request, "transcripts.read", f"read the transcript {view.id}", view)
    return view


@router.post("/{id}/replay", responses=errors(NotFound, BadRequest, NotReady, UpstreamError))
async def replay(
    request: Request,
    id: str,  # noqa: A002 - the name in the path
    body: NewReplay,
) -> ReplayView:
    """Send the request of a transcript to a model, and return both answers."""
    gateway = gateway_of(request)
    view = await asyncio.to_thread(transcripts_of(gateway).archive.find, id)
    _report(request, "transcripts.read", f"sent the transcript {view.id} to {body.model}", view)
    return await gateway.replays.replay(view, body.model, request.scope["caller"])


@router.delete("", responses=errors(NotFound))
async def delete_all(request: Request) -> DeletedTranscripts:
    """Delete all transcripts. Requests that are recorded go on being recorded."""
    archive = transcripts_of(gateway_of(request)).archive
    size = await asyncio.to_thread(archive.delete_all)
    _report(request, "transcripts.deleted", "deleted all transcripts")
    return DeletedTranscripts(bytes_freed=size)


def _report(request: Request, kind: EventKind, act: str, row: TranscriptRow | None = None) -> None:
    """Record an act and its reader as an event, without any word of a transcript."""
    reader = request.scope["caller"].name or "a caller without a key"
    data: dict[str, Any] = {"reader": reader}
    if row is not None:
        data["id"] = row.id
    event = Event(at=time.time(), kind=kind, words=f"{reader} {act}.", data=data)
    gateway_of(request).events.append([event])
