"""The admin API of searches for models that fit this machine."""

from __future__ import annotations

import asyncio
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field

from gateway.domain import Hardware, Value
from gateway.errors import BadModel, BadRequest, Busy, NotFound
from gateway.models.catalog.hub_search import Use
from gateway.planner.service.messages import SearchRequest
from gateway.proxy.api.error_bodies import errors
from gateway.proxy.disconnect import wait_for_disconnect
from gateway.server.gateway_parts import Gateway, gateway_of

router = APIRouter(prefix="/admin", tags=["admin"])


class SearchBody(Value):
    # Built now, because FastAPI inspects the model of a body before any validation.
    model_config = ConfigDict(defer_build=False)

    words: str = Field(
        "", max_length=200, description="words in the names; empty: suggestions, best first"
    )
    use: Use | None = Field(
        None, description="use of the models; None: any, and chat for suggestions without folders"
    )
    limit: int = Field(10, ge=1, le=50, description="models to read and plan")
    folders: tuple[str, ...] = Field(
        (), max_length=8, description="folders of this machine with models"
    )
    name: str = Field(
        "",
        max_length=64,
        description="name of the search for `GET /admin/search/{name}`, by the client's choice",
    )


class SearchState(Value):
    """The progress of a search."""

    phase: Literal["waiting", "searching", "reading", "planning", "none"] = Field(
        description="waiting: for other searches; searching: asking the Hub; none: no such search"
    )
    place: int = Field(description="models that the phase is done with")
    total: int = Field(description="models of the phase; 0: not counted yet")


class SearchedModel(Value):
    """A model with the planner's verdict for this machine. why: the refusal; "": it fits."""

    fits: bool
    name: str
    source: str = Field(description="source for `POST /admin/models`")
    base: str = Field(description="the repository of which this is a quantized form, or itself")
    why: str
    form: str = Field(description="the quantization of its weights")
    context: int
    tokens_s: float | None = Field(description="expected, of a single request; None: unknown")
    gpus: int
    engine: str
    weights_bytes: int


class SearchedModels(Value):
    """Models that fit come first, the best form of each before its others."""

    data: tuple[SearchedModel, ...]
    note: str = Field(description="why the Hub was not searched; empty: it was")


@router.post("/search", responses=errors(BadRequest, BadModel, Busy))
async def search_models(request: Request, body: SearchBody) -> SearchedModels:
    """Search the Hub, or without it the cache of this machine, and the folders. Each model and its
    quantized variants are planned for this machine as if no model of this gateway were loaded; in a
    cluster for the machine with the most memory. A client that leaves ends its search."""
    gateway = gateway_of(request)
    words = body.words.strip()
    question = SearchRequest(
        words=words,
        use=body.use or (None if words or body.folders else "chat"),
        limit=body.limit,
        folders=body.folders,
        machine=await _machine(gateway),
        held_bytes=gateway.loop.fleet.live_bytes(),
    )
    search = asyncio.ensure_future(gateway.searches.search(question, body.name))
    leave = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({search, leave}, return_when=asyncio.FIRST_COMPLETED)
        if search.done():
            return SearchedModels.model_validate(search.result())
        return SearchedModels(data=(), note="The client left.")  # nobody reads it
    finally:
        search.cancel()
        leave.cancel()
        await asyncio.wait({search, leave})


@router.get("/search/{name}", responses=errors(NotFound))
async def search_state(request: Request, name: str) -> SearchState:
    """The progress of a search, by the name in its request."""
    progress = gateway_of(request).searches.progress(name)
    return SearchState.model_validate(progress._asdict())


async def _machine(gateway: Gateway) -> Hardware:
    """This machine, or the one of a cluster with the most memory of GPUs."""
    if gateway.host.machines is None:
        return await gateway.loop.plan_preview.hardware()
    nodes = (await gateway.host.machines.cluster()).nodes
    machines = [node.hardware for node in nodes]
    return max(machines, key=lambda hardware: sum(gpu.total_bytes or 0 for gpu in hardware.gpus))
