"""The admin API of launch commands: the start of a model's engine without the gateway."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request

from gateway.engines.registry import engine_kind
from gateway.errors import Conflict, NotFound
from gateway.proxy.api.error_bodies import errors
from gateway.server.gateway_parts import gateway_of
from gateway.wishes.export.engine_start import EngineStart, engine_start

router = APIRouter(prefix="/admin/models", tags=["admin"])


@router.get("/{name:path}/launch", responses=errors(NotFound, Conflict))
async def launch(
    request: Request,
    name: str,
    port: Annotated[int, Query(ge=1, le=65535)] = 8000,
    place: Annotated[
        Literal["machine", "container"],
        Query(description="machine: as this gateway starts it; container: in the engine's image"),
    ] = "machine",
) -> EngineStart:
    """The command that starts a model's engine by its current or last plan, without keys and
    without folders of the gateway."""
    gateway = gateway_of(request)
    launcher = gateway.launcher
    model = gateway.loop.fleet.model(name)
    attempts = [attempt for replica in model.replicas for attempt in replica.attempts]
    if not attempts:
        raise Conflict(
            f"{name} was not started yet, so there is no command.",
            hint=f"`fitserve show {name}` shows its state.",
        )
    latest = max(attempts, key=lambda attempt: (attempt.state == "ready", attempt.id))
    is_in_container = place == "container" or launcher.host.kind == "docker"
    remote_code = model.wish.policy.allow_remote_code
    spec = await asyncio.to_thread(
        launcher.measuring_launch,
        latest,
        port,
        gateway.hub.disk.snapshot,
        is_in_container=is_in_container,
        remote_code=remote_code,
    )
    argv = engine_kind(spec.engine.kind).serve_command(spec.argv)
    return engine_start(spec.evolve(argv=argv), is_in_container=is_in_container)
