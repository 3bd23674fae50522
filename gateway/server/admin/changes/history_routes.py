"""The admin API of former wishes: look at them, and go back to one."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field

from gateway.controller.decisions.changes import Difference, diff_wishes
from gateway.controller.decisions.wish_history import WishState, version_to_restore, wish_states
from gateway.controller.fleet.managed_model import ManagedModel
from gateway.domain import Value, Wish
from gateway.domain.wish import Way, WishVersion
from gateway.errors import Conflict, NotFound, StoreError
from gateway.proxy.api.error_bodies import errors
from gateway.server.admin.changes.model_change import PLAN_ERRORS, change_wish
from gateway.server.admin.changes.wish_origin import wish_origin
from gateway.server.admin.model_views import ChangeAnswer
from gateway.server.gateway_parts import gateway_of
from gateway.wishes.steps import patch

router = APIRouter(prefix="/admin/models", tags=["admin"])

_UNREADABLE = "This version of the gateway cannot read the stored form of the wish."


class VersionView(Value):
    """A wish of a model's history."""

    number: int
    at: float = Field(description="time of the change, in Unix seconds")
    key: str = Field(description="name of the author's key; empty: none")
    way: Way
    state: WishState
    refused: str = Field(description="cause why it was given up; empty: it was in force")
    restored: int | None = Field(description="number of the wish that a rollback restored")
    problem: str = Field(
        "", description="cause why its changes are unknown and it cannot be restored; empty: none"
    )
    changes: tuple[Difference, ...] = Field(
        description="differences from the accepted wish before; from the defaults for the first"
    )


class HistoryView(Value):
    name: str
    data: tuple[VersionView, ...] = Field(description="newest first")


class RollbackBody(Value):
    """The wish to restore."""

    # Built now, because FastAPI inspects the model of a body before any validation.
    model_config = ConfigDict(defer_build=False)

    number: int | None = Field(
        None, ge=1, description="number of the wish; None: the last former one that differs"
    )


@router.get("/{name:path}/history", responses=errors(NotFound))
async def show_history(request: Request, name: str) -> HistoryView:
    """The wishes of a model with author, time and changes. The newest 50 are kept."""
    gateway = gateway_of(request)
    model = gateway.loop.fleet.model(name)
    versions = await asyncio.to_thread(gateway.store.wishes.versions, model.wish.name)
    return HistoryView(
        name=model.wish.name,
        data=tuple(reversed(_views(versions, is_underway=_is_underway(model)))),
    )


@router.post(
    "/{name:path}/rollback",
    status_code=202,
    response_model=ChangeAnswer,
    responses={
        200: {"model": ChangeAnswer, "description": "No engine is restarted"},
        **errors(*PLAN_ERRORS, Conflict, StoreError),
    },
)
async def roll_back(
    request: Request, name: str, body: RollbackBody, dry_run: bool = False
) -> Response:
    """Change a model to a former wish, by the same checks as PATCH. With `dry_run` nothing is
    done."""
    gateway = gateway_of(request)
    model = gateway.loop.fleet.model(name)
    versions = await asyncio.to_thread(gateway.store.wishes.versions, model.wish.name)
    version = version_to_restore(
        model.wish.name, versions, body.number, is_underway=_is_underway(model)
    )
    fields = patch(model.wish.model_dump(mode="json"), version.wish.model_dump(mode="json"))
    origin = wish_origin(request, restored=version.number)
    return await change_wish(gateway, model, fields, origin, dry_run=dry_run)


def _is_underway(model: ManagedModel) -> bool:
    return model.change is not None and not model.change.refusal_text


def _views(versions: list[WishVersion], *, is_underway: bool) -> list[VersionView]:
    """The views of the wishes, oldest first."""
    views: list[VersionView] = []
    former_wish: Wish | None = None
    states = wish_states(versions, is_underway=is_underway)
    for version, state in zip(versions, states, strict=True):
        former_wish = former_wish or Wish(name=version.wish.name)
        is_readable = version.is_readable
        views.append(
            VersionView(
                number=version.number,
                at=version.origin.at,
                key=version.origin.key,
                way=version.origin.way,
                state=state,
                refused=version.refused,
                restored=version.origin.restored,
                problem="" if is_readable else _UNREADABLE,
                changes=diff_wishes(former_wish, version.wish) if is_readable else (),
            )
        )
        if is_readable and not version.refused:
            former_wish = version.wish
    return views
