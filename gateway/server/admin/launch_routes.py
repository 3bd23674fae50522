"""The admin API of starts: how the engine of a model is started, for who wants to start it without
the gateway."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request

from gateway.errors import Conflict, NotFound
from gateway.proxy.api.error_bodies import errors
from gateway.wishes.export.engine_start import EngineStart, engine_start

router = APIRouter(prefix="/admin/models", tags=["admin"])


@router.get("/{name:path}/launch", responses=errors(NotFound, Conflict))
async def launch(
    request: Request,
    name: str,
    port: Annotated[int, Query(ge=1, le=65535)] = 8000,
    place: Annotated[
        Literal["machine", "container"],
        Query(description="machine: as this gateway starts it; container: in its image"),
    ] = "machine",
) -> EngineStart:
    """How the engine of a model is started by the plan that serves it, or else by its last one:
    with no key, and no folder of the gateway's own."""
    state: Any = request.app.state
    launcher, model = state.launcher, state.fleet.model(name)
    attempts = [one for replica in model.replicas for one in replica.attempts]
    if not attempts:
        raise Conflict(
            f"{name} was not started yet, so nobody knows how.",
            hint=f"`fitserve show {name}` says how far it is.",
        )
    latest = max(attempts, key=lambda one: (one.state == "ready", one.id))
    container = place == "container" or launcher.host.kind == "docker"
    remote_code = model.wish.policy.allow_remote_code
    spec = await asyncio.to_thread(
        launcher.described,
        latest,
        port,
        state.hub.disk.snapshot,
        container=container,
        remote_code=remote_code,
    )
    return engine_start(spec, container=container)
