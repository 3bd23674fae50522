"""The admin API: models, plans, hardware. FastAPI routes over orders and the plan preview; nothing here
decides."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import ValidationError

from gateway.controller.decisions.changes import (
    diff_plans,
    diff_wishes,
    may_need_restart,
    starts_same_engine,
)
from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import ManagedModel
from gateway.controller.orders import Orders
from gateway.controller.plan_preview import PlanPreview
from gateway.domain import Decision, Hardware, Wish
from gateway.domain.value import Form, first_problem
from gateway.domain.wish import ModelName
from gateway.errors import (
    BadFlag,
    BadModel,
    BadRequest,
    Conflict,
    HostError,
    NeedsRemoteCode,
    NoPlan,
    NotFound,
    StoreError,
)
from gateway.proxy.api.error_bodies import errors
from gateway.server.admin import bench_routes, launch_routes
from gateway.server.admin.disk_routes import RemovedWeights, remove_with_weights
from gateway.server.admin.model_views import ChangeAnswer, ModelList, ModelView, view
from gateway.settings import Settings
from gateway.store.engine_logs import log_path, read_log
from gateway.wishes.model_request import ModelRequest

router = APIRouter(prefix="/admin", tags=["admin"])


# What planning tells of a model.
_UNPLANNED = (BadRequest, BadModel, NeedsRemoteCode, BadFlag, NotFound, NoPlan, HostError)


class PlanRequest(ModelRequest):
    """As for adding a model; `hardware` names a snapshot to plan for instead of this machine."""

    name: ModelName = "plan"
    hardware: (
        Annotated[
            str,
            Form(
                r"^[\w.-]{1,64}$",
                "a snapshot's name has up to 64 letters, digits, `_`, `-` and `.`",
            ),
        ]
        | None
    ) = None


@router.post(
    "/models",
    status_code=202,
    response_model=ModelView,
    responses={
        200: {"model": Decision, "description": "With `dry_run`"},
        **errors(*_UNPLANNED, Conflict, StoreError),
    },
)
async def add_model(request: Request, body: ModelRequest, dry_run: bool = False) -> Any:
    """Add a model: 202, and the gateway starts working on it. With `dry_run` the plan is returned,
    and nothing happens."""
    plan_preview: PlanPreview = request.app.state.plan_preview
    orders: Orders = request.app.state.orders
    wish = body.wish()
    _check_name(wish.name)
    wish = await plan_preview.named(wish)
    if dry_run:
        return _json((await plan_preview.plan(wish, include_uninstalled=True)).decision)
    if wish.source is not None:
        # Everything that is wrong with the model, a flag or the machine is said now, not in a state
        # message later.
        planned = await plan_preview.plan(wish)
        wish = wish.evolve(commits=dict(planned.commits))
    return await _shown(request, await orders.add(wish), 202)


@router.get("/models")
async def list_models(request: Request) -> ModelList:
    fleet: Fleet = request.app.state.fleet
    return ModelList(
        data=tuple(view(model, fleet.keep_alive_s(model.wish)) for model in fleet.models.values())
    )


@router.get(
    "/models/{name:path}/logs", response_class=PlainTextResponse, responses=errors(NotFound)
)
async def logs(
    request: Request,
    name: str,
    attempt: int | None = None,
    follow: bool = False,
    tail: Annotated[int | None, Query(ge=1, le=100_000)] = None,
) -> StreamingResponse:
    """The engine's log as text: of the running or else the last attempt, or of the one given."""
    fleet: Fleet = request.app.state.fleet
    settings: Settings = request.app.state.settings
    model = fleet.model(name)
    attempts = await asyncio.to_thread(request.app.state.store.attempts, model.wish.name)
    wanted = [one for one in attempts if attempt is None or one.id == attempt]
    if not wanted:
        which = f"no attempt {attempt}" if attempt is not None else "not been started yet"
        raise NotFound(
            f"{name} has {which}, so there is no log.",
            hint=f"`fitserve show {name}` lists the attempts.",
        )
    chosen = wanted[-1]

    def running() -> bool:
        removed = fleet.models.get(name) is not model
        return not removed and any(
            replica.attempt is not None and replica.attempt.id == chosen.id
            for replica in model.replicas
        )

    lines = read_log(
        log_path(settings.data, chosen.instance_name), tail=tail, follow=running if follow else None
    )
    return StreamingResponse(lines, media_type="text/plain; charset=utf-8")


@router.get("/models/{name:path}", response_model=ModelView, responses=errors(NotFound))
async def show_model(request: Request, name: str) -> Response:
    return await _shown(request, request.app.state.fleet.model(name))


@router.delete(
    "/models/{name:path}", status_code=202, responses=errors(NotFound, Conflict, StoreError)
)
async def remove_model(
    request: Request, name: str, weights: bool = False
) -> dict[str, str] | RemovedWeights:
    """Stop its engines and forget it. With `weights` the answer comes when nothing of it runs any
    more, and its weights are gone, as far as no
    other model needs them."""
    if weights:
        return await remove_with_weights(request, name)
    await request.app.state.orders.remove(name)
    return {"name": name, "state": "stopping"}


@router.patch(
    "/models/{name:path}",
    status_code=202,
    response_model=ChangeAnswer,
    responses={
        200: {"model": ChangeAnswer, "description": "Nothing is started anew"},
        **errors(*_UNPLANNED, Conflict, StoreError),
    },
)
async def change_model(
    request: Request, name: str, body: dict[str, Any], dry_run: bool = False
) -> Response:
    """Change a model: the fields that are given are its new wish (a JSON merge patch, RFC 7396:
    null takes a field back to its default). What the change
    does is said at once; 202 where engines are brought to it now, 200 where nothing is started
    anew. With `dry_run` nothing is done.
    """
    fleet: Fleet = request.app.state.fleet
    plan_preview: PlanPreview = request.app.state.plan_preview
    orders: Orders = request.app.state.orders
    model = fleet.model(name)
    old = model.wish
    wish = await plan_preview.named(_patched(old, body))
    anew, planned = may_need_restart(old, wish), None
    if anew and wish.source is not None:
        planned = await plan_preview.plan_change(model, wish)
        if planned.unconfirmed_repos and "commits" in body:
            raise BadModel(
                f"The Hub could not be asked what {', '.join(planned.unconfirmed_repos)} is now; {name} stays"
                " as it is.",
                hint="Try again when it can be reached.",
            )
        wish = wish.evolve(commits=dict(planned.commits))
        running = [attempt.plan for attempt in model.serving]
        plan = planned.plan
        anew = (
            not running or plan is None or not all(starts_same_engine(plan, one) for one in running)
        )
        if plan is None and not planned.questions and not dry_run:
            raise NoPlan(
                f"Nothing was changed: {planned.reason.rstrip('.')}.",
                hint=f"`fitserve plan` says more; {name} goes on as it is.",
            )
    else:
        anew = False
    answer = ChangeAnswer(
        name=name,
        anew=anew,
        wish=diff_wishes(old, wish),
        commits=wish.commits,
        plan=(
            diff_plans(model.serving[0].plan, planned.plan)
            if planned and planned.plan and model.serving
            else ()
        ),
        reason=planned.reason if planned is not None and planned.plan is None else "",
    )
    if not dry_run and wish != old:
        await orders.change(model, old, wish, anew=anew)
    text = answer.model_dump_json(exclude={"decision"}).encode()
    decision = planned.decision if dry_run and planned is not None else b"null"
    return _json(
        b'%b,"decision":%b}' % (text.removesuffix(b"}"), decision),
        202 if anew and not dry_run else 200,
    )


@router.post(
    "/models/{name:path}/retry",
    status_code=202,
    response_model=ModelView,
    responses=errors(NotFound, Conflict, StoreError),
)
async def retry_model(request: Request, name: str) -> Any:
    """Lift quarantine and back-off: what failed until now no longer counts, and the next start is
    made at once, from the images
    that their names mean then."""
    return await _shown(request, await request.app.state.orders.retry(name), 202)


@router.post(
    "/models/{name:path}/stop",
    status_code=202,
    response_model=ModelView,
    responses=errors(NotFound, Conflict, StoreError),
)
async def stop_model(request: Request, name: str) -> Any:
    """End its engines once they have answered what they work on, and load it no more, also after a
    restart, until it is started."""
    return await _shown(request, await request.app.state.orders.stop(name), 202)


@router.post(
    "/models/{name:path}/start",
    status_code=202,
    response_model=ModelView,
    responses=errors(NotFound, Conflict, StoreError),
)
async def start_model(request: Request, name: str) -> Any:
    """Load a model again that was stopped."""
    return await _shown(request, await request.app.state.orders.start(name), 202)


@router.post("/plan", response_model=Decision, responses=errors(*_UNPLANNED))
async def make_plan(request: Request, body: PlanRequest) -> Response:
    """What would be done for this model, on this machine or on a snapshot. Nothing is started."""
    plan_preview: PlanPreview = request.app.state.plan_preview
    asked = ModelRequest.model_validate(body.model_dump(exclude={"hardware"})).wish()
    wish = await plan_preview.named(asked)
    if body.hardware:
        wish = wish.evolve(gpus=asked.gpus)  # numbers are of the snapshot
    return _json((await plan_preview.plan(wish, body.hardware, include_uninstalled=True)).decision)


@router.get("/hardware")
async def hardware(request: Request) -> Hardware:
    """What the probe reads now."""
    plan_preview: PlanPreview = request.app.state.plan_preview
    return await plan_preview.hardware()


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")


async def _shown(request: Request, model: ManagedModel, status: int = 200) -> Response:
    """The whole view. Its decision is JSON already, and is not read and written again: it may be
    megabytes."""
    fleet: Fleet = request.app.state.fleet
    attempts = (
        await asyncio.to_thread(request.app.state.store.attempts, model.wish.name)
        if model.replicas
        else []
    )
    shown = view(model, fleet.keep_alive_s(model.wish), attempts, full=True)
    text = shown.model_dump_json(exclude={"decision"}).encode()
    return _json(
        b'%b,"decision":%b}' % (text.removesuffix(b"}"), model.decision or b"null"), status
    )


def _check_name(name: str) -> None:
    """Raises BadRequest where another route would be meant by the name: /admin/models/a/logs are
    the logs of `a`."""
    last = name.rpartition("/")[2]
    routes = (*router.routes, *bench_routes.router.routes, *launch_routes.router.routes)
    if "/" in name and any(
        route.path.endswith(f"}}/{last}") for route in routes if isinstance(route, APIRoute)
    ):
        raise BadRequest(
            f"A name may not end in /{last}: /admin/models/{name} asks for something of the model"
            f" {name.rpartition('/')[0]}.",
            hint="Choose another name.",
            param="name",
        )


def _patched(wish: Wish, patch: dict[str, Any]) -> Wish:
    """The wish with what a JSON merge patch says. Raises BadRequest."""
    if patch.get("name", wish.name) != wish.name:
        raise BadRequest(
            "A model keeps its name.",
            hint="Add it under the other name, then remove this one.",
            param="name",
        )
    fields = _merged(wish.model_dump(mode="json"), patch)
    try:
        changed = ModelRequest.model_validate(fields).wish()
    except ValidationError as error:
        raise BadRequest(f"{first_problem(error)}.", hint="Nothing was changed.") from None
    if bool(changed.source) != bool(wish.source):
        raise BadRequest(
            "A model cannot become an endpoint, nor an endpoint a model.",
            hint="Remove it, and add the other.",
            param="source",
        )
    return changed


def _merged(old: Any, patch: Any) -> Any:
    """As RFC 7396 has it."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(merged.get(name), value)
    return merged
