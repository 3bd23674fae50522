"""The admin API of models, plans and hardware."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

from gateway.controller.fleet.managed_model import ManagedModel
from gateway.domain import Decision, ExpectedStart, Hardware, Wish
from gateway.domain.plan_request import PlanResult
from gateway.domain.value import TextForm
from gateway.domain.wish import ModelName
from gateway.errors import BadRequest, Conflict, NotFound, StoreError
from gateway.proxy.access.scopes import SCOPES
from gateway.proxy.api.error_bodies import errors
from gateway.server.admin.changes.model_change import PLAN_ERRORS, change_wish
from gateway.server.admin.changes.wish_origin import wish_origin
from gateway.server.admin.disk_routes import RemovedWeights, remove_with_weights
from gateway.server.admin.kept_views import ViewCache
from gateway.server.admin.model_views import ChangeAnswer, ModelList, ModelView, view
from gateway.server.gateway_parts import Gateway, gateway_of
from gateway.store.engine_logs import log_path, read_log
from gateway.wishes.model_request import ModelRequest

router = APIRouter(prefix="/admin", tags=["admin"])


# Views of models that are rendered before streams have their turn.
_VIEWS_AT_ONCE = 8


class PlanBody(ModelRequest):
    """A request like adding a model; `hardware` names a snapshot that replaces this machine."""

    name: ModelName = "plan"
    hardware: (
        Annotated[
            str,
            TextForm(
                r"^[\w.-]{1,64}$",
                "the name of a snapshot has up to 64 letters, digits, `_`, `-` and `.`",
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
        **errors(*PLAN_ERRORS, Conflict, StoreError),
    },
)
async def add_model(
    request: Request,
    body: ModelRequest,
    dry_run: bool = False,
    idempotency_key: Annotated[str, Header(max_length=200)] = "",
) -> Any:
    """Add a model. The answer is 202, and the gateway starts to work on it. With `dry_run` the same
    checks are made, and only the plan is returned. A repeated request with the same
    `Idempotency-Key` is answered like the first, as long as the model exists and this gateway
    runs."""
    gateway = gateway_of(request)
    plan_preview = gateway.loop.plan_preview
    owner_commands = gateway.loop.owner_commands
    wish = body.wish()
    _check_name(wish.name)
    wish = await plan_preview.resolve(wish)
    # Nothing is awaited between the look for the key and that for the name.
    added = None if dry_run else owner_commands.model_of_key(idempotency_key, wish.name)
    if added is not None:
        return await _view_response(request, added, 202)
    gateway.loop.fleet.check_new(wish)
    if dry_run:
        result = await plan_preview.plan(wish, include_uninstalled=True)
        return _json_response(await _add_start(gateway, wish, result))
    if wish.source is not None:
        # Errors of the model, a flag or the machine are reported now, not in a later state message.
        result = await plan_preview.plan(wish)
        wish = wish.evolve(commits=dict(result.commits))
    model = await owner_commands.add(wish, idempotency_key, wish_origin(request))
    return await _view_response(request, model, 202)


@router.get("/models", response_model=ModelList)
async def list_models(request: Request) -> Response:
    gateway = gateway_of(request)
    fleet = gateway.loop.fleet
    starts = gateway.loop.starts
    cache = ViewCache()  # The rendering of the first request serves all others too.

    async def render() -> bytes:
        views = []
        renderings = 0
        for model in list(fleet.models.values()):
            text = cache.text(model)
            if text is None:
                model_view = view(model, fleet.keep_alive_s(model.wish), starts)
                text = model_view.model_dump_json()
                cache.store(model, text)
                renderings += 1
                if renderings % _VIEWS_AT_ONCE == 0:
                    await asyncio.sleep(0)
            views.append(text)
        cache.retain(fleet.models.keys())
        return f'{{"data":[{",".join(views)}]}}'.encode()

    return _json_response(await gateway.shared_answer("models", render))


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
    """The engine's log as text: of the running or last attempt, or of the given one."""
    gateway = gateway_of(request)
    fleet = gateway.loop.fleet
    settings = gateway.serving.settings
    model = fleet.model(name)
    attempts = await asyncio.to_thread(gateway.store.attempts, model.wish.name)
    attempts_wanted = [entry for entry in attempts if attempt is None or entry.id == attempt]
    if not attempts_wanted:
        missing_words = f"no attempt {attempt}" if attempt is not None else "not been started yet"
        raise NotFound(
            f"{name} has {missing_words}, so there is no log.",
            hint=f"`fitserve show {name}` lists the attempts.",
        )
    chosen_attempt = attempts_wanted[-1]

    def is_running() -> bool:
        is_removed = fleet.models.get(name) is not model
        return not is_removed and any(
            replica.attempt is not None and replica.attempt.id == chosen_attempt.id
            for replica in model.replicas
        )

    is_in_cluster = gateway.host.machines is not None
    path = log_path(settings.data, chosen_attempt.instance_name, is_in_cluster=is_in_cluster)
    lines = read_log(path, tail=tail, follow=is_running if follow else None)
    return StreamingResponse(lines, media_type="text/plain; charset=utf-8")


@router.get("/models/{name:path}", response_model=ModelView, responses=errors(NotFound))
async def show_model(request: Request, name: str) -> Response:
    return await _view_response(request, gateway_of(request).loop.fleet.model(name))


@router.delete(
    "/models/{name:path}", status_code=202, responses=errors(NotFound, Conflict, StoreError)
)
async def remove_model(
    request: Request, name: str, weights: bool = False
) -> dict[str, str] | RemovedWeights:
    """Stop the engines of a model and forget it. With `weights` the answer comes once all engines
    have ended and its weights are deleted, except those that other models need."""
    if weights:
        return await remove_with_weights(request, name)
    await gateway_of(request).loop.owner_commands.remove(name)
    return {"name": name, "state": "stopping"}


@router.patch(
    "/models/{name:path}",
    status_code=202,
    response_model=ChangeAnswer,
    responses={
        200: {"model": ChangeAnswer, "description": "No engine is restarted"},
        **errors(*PLAN_ERRORS, Conflict, StoreError),
    },
)
async def change_model(
    request: Request, name: str, body: dict[str, Any], dry_run: bool = False
) -> Response:
    """Change a model by a JSON merge patch (RFC 7396: null resets a field to its default). The
    answer describes the effects: 202 if engines will be changed, 200 if none is restarted. With
    `dry_run` nothing is done."""
    gateway = gateway_of(request)
    model = gateway.loop.fleet.model(name)
    return await change_wish(gateway, model, body, wish_origin(request), dry_run=dry_run)


@router.post(
    "/models/{name:path}/retry",
    status_code=202,
    response_model=ModelView,
    responses=errors(NotFound, Conflict, StoreError),
)
async def retry_model(request: Request, name: str) -> Any:
    """Lift quarantine and back-off: earlier failures no longer count, and the next start follows
    immediately, from the current images of their names."""
    return await _view_response(
        request, await gateway_of(request).loop.owner_commands.retry(name), 202
    )


@router.post(
    "/models/{name:path}/stop",
    status_code=202,
    response_model=ModelView,
    responses=errors(NotFound, Conflict, StoreError),
)
async def stop_model(request: Request, name: str) -> Any:
    """End the engines after their current requests, and keep the model unloaded, also after a
    restart, until it is started."""
    return await _view_response(
        request, await gateway_of(request).loop.owner_commands.stop(name), 202
    )


@router.post(
    "/models/{name:path}/unload",
    status_code=202,
    response_model=ModelView,
    responses=errors(NotFound, Conflict),
)
async def unload_model(request: Request, name: str) -> Any:
    """End the engines after their current requests. The next request loads the model again."""
    return await _view_response(
        request, await gateway_of(request).loop.owner_commands.unload(name), 202
    )


@router.post(
    "/models/{name:path}/start",
    status_code=202,
    response_model=ModelView,
    responses=errors(NotFound, Conflict, StoreError),
)
async def start_model(request: Request, name: str) -> Any:
    """Load a stopped model again."""
    return await _view_response(
        request, await gateway_of(request).loop.owner_commands.start(name), 202
    )


@router.post("/plan", response_model=Decision, responses=errors(*PLAN_ERRORS))
async def make_plan(request: Request, body: PlanBody) -> Response:
    """The plan for a model on this machine or on a snapshot. Nothing is started."""
    gateway = gateway_of(request)
    plan_preview = gateway.loop.plan_preview
    requested_wish = ModelRequest.model_validate(body.model_dump(exclude={"hardware"})).wish()
    wish = await plan_preview.resolve(requested_wish)
    if body.hardware:
        wish = wish.evolve(gpus=requested_wish.gpus)  # GPU numbers refer to the snapshot
    # A plan may be of a model that is not here yet.
    result = await plan_preview.plan(
        wish, body.hardware, include_uninstalled=True, needs_weights=False
    )
    return _json_response(
        result.decision if body.hardware else await _add_start(gateway, wish, result)
    )


@router.get("/hardware")
async def hardware(request: Request) -> Hardware:
    """The machine, as the probe reads it now."""
    plan_preview = gateway_of(request).loop.plan_preview
    return await plan_preview.hardware()


def _json_response(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")


async def _add_start(gateway: Gateway, wish: Wish, result: PlanResult) -> bytes:
    """The decision with the expected start of its plan, which is the last field."""
    if result.plan is None:
        return result.decision
    remote_code = wish.policy.allow_remote_code
    conditions = await gateway.launcher.conditions(result.plan, allow_remote_code=remote_code)
    time = gateway.loop.starts.expected_time(result.plan, conditions)
    start = ExpectedStart(conditions=conditions, time=time).model_dump_json().encode()
    return b"%b%b}" % (result.decision.removesuffix(b"null}"), start)


async def _view_response(request: Request, model: ManagedModel, status: int = 200) -> Response:
    """The complete view. The decision is JSON already and may be megabytes, so it is not parsed
    again."""
    gateway = gateway_of(request)
    fleet = gateway.loop.fleet
    starts = gateway.loop.starts
    attempts = (
        await asyncio.to_thread(gateway.store.attempts, model.wish.name) if model.replicas else []
    )
    model_view = view(model, fleet.keep_alive_s(model.wish), starts, attempts, shows_all=True)
    text = model_view.model_dump_json(exclude={"decision"}).encode()
    return _json_response(
        b'%b,"decision":%b}' % (text.removesuffix(b"}"), model.decision or b"null"), status
    )


def _check_name(name: str) -> None:
    """Refuse a name that another route would match: /admin/models/a/logs are the logs of `a`.
    Raises BadRequest."""
    last = name.rpartition("/")[2]
    if "/" in name and any(path.endswith(f"}}/{last}") for _, path in SCOPES):
        raise BadRequest(
            f"A name may not end in /{last}: /admin/models/{name} is a route of the model"
            f" {name.rpartition('/')[0]}.",
            hint="Choose another name.",
            param="name",
        )
