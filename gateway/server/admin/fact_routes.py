"""The admin API of what was learned: list, give, drop. Facts that ship with the profiles are shown
and cannot be dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from pydantic import ConfigDict, Field

from gateway.controller.fleet.fleet import Fleet
from gateway.controller.plan_preview import PlanPreview
from gateway.diagnosis.facts.scope import gone
from gateway.domain import Fact, Value
from gateway.errors import Conflict, NotFound, StoreError
from gateway.profiles.profiles import Profiles
from gateway.proxy.api.error_bodies import errors
from gateway.store.store import Store

router = APIRouter(prefix="/admin/facts", tags=["facts"])
_MOST = 10_000
# SQLite counts its rows so far.
_MOST_ROWS = 2**63 - 1
# What is learned here is kept beyond that.
_MOST_KEPT = 2 * _MOST


class FactView(Value):
    """`id` is None for one that ships with the profiles."""

    id: int | None
    stale: str | None = Field(None, description="why it is not applied any more")
    fact: Fact


class FactList(Value):
    data: tuple[FactView, ...]


class FactsGiven(Value):
    """As `fitserve facts export` writes them."""

    model_config = ConfigDict(defer_build=False)

    facts: tuple[Fact, ...] = Field(max_length=_MOST)


@router.get("", response_model=FactList)
async def list_facts(request: Request) -> Response:
    """All facts, those of the profiles first."""
    fleet: Fleet = request.app.state.fleet
    plan_preview: PlanPreview = request.app.state.plan_preview
    profiles: Profiles = request.app.state.profiles
    store: Store = request.app.state.store
    hardware, learned = await asyncio.gather(
        plan_preview.hardware(), asyncio.to_thread(store.numbered_facts)
    )

    def told() -> bytes:
        # Row by row, beside the event loop: all at once they would hold the interpreter for a tenth
        # of a second.
        own = {model.wish.image for model in [*fleet.models.values()] if model.wish.image}
        images, shipped = profiles.images | own, [(None, fact) for fact in profiles.facts]
        views = (
            FactView(id=id_, stale=gone(fact, hardware.driver, images), fact=fact)
            for id_, fact in [*shipped, *learned]
        )
        return b'{"data":[%b]}' % b",".join(view.model_dump_json().encode() for view in views)

    return Response(await asyncio.to_thread(told), media_type="application/json")


@router.post("", status_code=201, responses=errors(Conflict, StoreError))
async def give_facts(request: Request, body: FactsGiven) -> dict[str, int]:
    """Add facts that another gateway learned. Those that are here already are not added twice."""
    store: Store = request.app.state.store
    store.changeable()
    if sum((await asyncio.to_thread(store.fact_counts)).values()) + len(body.facts) > _MOST_KEPT:
        raise Conflict(
            f"With these there could be more than {_MOST_KEPT} facts, and every plan looks"
            " them up.",
            hint=(
                "`fitserve facts ls` lists those that are here; drop stale ones with `fitserve"
                " facts rm`."
            ),
        )
    added = await asyncio.to_thread(store.add_facts, body.facts)
    wake: Callable[[], None] = request.app.state.wake
    wake()
    return {"added": added}


@router.delete("/{number}", responses=errors(NotFound, StoreError))
async def drop_fact(
    request: Request, number: Annotated[int, Path(ge=1, le=_MOST_ROWS)]
) -> dict[str, Any]:
    """Forget one: what it ruled out may be planned again."""
    store: Store = request.app.state.store
    store.changeable()
    await asyncio.to_thread(store.remove_fact, number)
    wake: Callable[[], None] = request.app.state.wake
    wake()
    return {"id": number, "state": "removed"}
