"""Routes for supervisors with the state of the gateway: version, liveness, readiness."""

from __future__ import annotations

import time

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from starlette.requests import Request

from gateway.server.gateway_parts import gateway_of
from gateway.version import __version__

# A longer time since the last pass of the control loop means that the loop hangs.
_STALE_S = 15.0
_Readiness = dict[str, str | list[str]]

router = APIRouter()


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of fitserve, in the form that engines use."""
    return {"version": __version__}


@router.head("/health", include_in_schema=False)
@router.head("/healthz", include_in_schema=False)
@router.get(
    "/health",
    response_model=dict[str, str],
    responses={503: {"model": dict[str, str], "description": "Not healthy"}},
)
@router.get(
    "/healthz",
    response_model=dict[str, str],
    responses={503: {"model": dict[str, str], "description": "Not healthy"}},
)
async def healthz(request: Request) -> JSONResponse:
    """Whether inference is answered and the control loop runs. The check does no I/O, so a slow
    disk or Docker cannot fail it."""
    gateway = gateway_of(request)
    workers = gateway.serving.workers
    if workers is not None and workers.alive == 0:
        status = "no worker"
    else:
        status = "no loop" if gateway.app.failure else "ok"
    return JSONResponse({"status": status}, 200 if status == "ok" else 503)


@router.head("/readyz", include_in_schema=False)
@router.get(
    "/readyz",
    response_model=_Readiness,
    responses={503: {"model": _Readiness, "description": "Not ready"}},
)
async def readyz(request: Request) -> JSONResponse:
    """Whether the gateway can do its work: the control loop runs, the store and the host answer."""
    gateway = gateway_of(request)
    health = gateway.loop.health
    problems = []
    # The store knows its damage before the next pass of the loop.
    if health.store_problem or gateway.store.failing:
        problems.append("store")
    if health.host_problem:
        problems.append("host")
    is_stale = time.monotonic() - health.last_pass > _STALE_S
    if gateway.app.failure or health.problem or is_stale:
        problems.append("loop")
    return JSONResponse(
        {"status": "not ready" if problems else "ok", "problems": problems},
        503 if problems else 200,
    )
