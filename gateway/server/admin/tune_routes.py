"""The admin API of searches for better plans: begin, look, end, and take the result."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field

from gateway.domain import Value
from gateway.errors import BadModel, Conflict, HostError, NotFound, StoreError
from gateway.measuring.tuning.tuning_report import SearchOptions, TuningReport
from gateway.proxy.api.error_bodies import errors
from gateway.server.admin.changes.wish_origin import wish_origin
from gateway.server.gateway_parts import gateway_of

router = APIRouter(prefix="/admin/models", tags=["admin"])


class TuneBody(Value):
    """The bounds of a search."""

    # Built now, because FastAPI inspects the model of a body before any validation.
    model_config = ConfigDict(defer_build=False)

    minutes: float = Field(15, gt=0, le=24 * 60, description="longest time of the search")
    offline: bool = Field(
        False,
        description=(
            "stop the model's engines meanwhile, where memory is too small for a second engine"
        ),
    )
    lossy: bool = Field(
        False, description="try a KV cache of less precision, which costs some accuracy"
    )


@router.post(
    "/{name:path}/tune",
    status_code=202,
    responses=errors(NotFound, Conflict, BadModel, HostError, StoreError),
)
async def start_tuning(request: Request, name: str, body: TuneBody) -> TuningReport:
    """Search for a faster plan by trials on this machine. Nothing of the model changes. The answer
    is 202, and GET shows the progress."""
    options = SearchOptions(body.minutes * 60, may_be_away=body.offline, allows_lossy=body.lossy)
    return await gateway_of(request).tuning.tunings.start(name, options)


@router.get("/{name:path}/tune", responses=errors(NotFound))
async def show_tuning(request: Request, name: str) -> TuningReport:
    """The running or last search of the model, with the figures of every plan."""
    return gateway_of(request).tuning.tunings.report(name)


@router.delete("/{name:path}/tune", responses=errors(NotFound))
async def stop_tuning(request: Request, name: str) -> TuningReport:
    """End the search. The model goes on by the plan that it had."""
    return await gateway_of(request).tuning.tunings.stop(name)


@router.post(
    "/{name:path}/tune/apply", status_code=202, responses=errors(NotFound, Conflict, StoreError)
)
async def apply_tuning(request: Request, name: str) -> TuningReport:
    """Change the model to the best plan of its last search, as a change by PATCH."""
    key = wish_origin(request).key
    return await gateway_of(request).tuning.tunings.apply(name, key)
