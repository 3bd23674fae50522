"""The admin API of learned facts: list, add, remove. Facts of the profiles are listed too."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from pydantic import ConfigDict, Field

from gateway.diagnosis.facts.scope import stale_reason
from gateway.domain import Fact, Value
from gateway.errors import Conflict, NotFound, StoreError
from gateway.proxy.api.error_bodies import errors
from gateway.server.gateway_parts import gateway_of

router = APIRouter(prefix="/admin/facts", tags=["facts"])
_MAX_FACTS = 10_000
# the largest row id of SQLite
_MAX_ROW_ID = 2**63 - 1
# a limit of added facts; facts learned here are always kept
_MAX_STORED_FACTS = 2 * _MAX_FACTS


class FactView(Value):
    """A fact. `id` is None for a fact of the profiles."""

    id: int | None
    stale: str | None = Field(None, description="cause why the fact is no longer applied")
    fact: Fact


class FactList(Value):
    data: tuple[FactView, ...]
    problem: str = Field("", description="sentence on facts that are left out; empty: none")


class FactsImport(Value):
    """Facts in the form of `fitserve facts export`."""

    model_config = ConfigDict(defer_build=False)

    facts: tuple[Fact, ...] = Field(max_length=_MAX_FACTS)


@router.get("", response_model=FactList)
async def list_facts(request: Request) -> Response:
    """All facts, those of the profiles first."""
    gateway = gateway_of(request)
    fleet = gateway.loop.fleet
    plan_preview = gateway.loop.plan_preview
    profiles = gateway.serving.profiles
    store = gateway.store
    hardware, learned_facts = await asyncio.gather(
        plan_preview.hardware(), asyncio.to_thread(store.numbered_facts)
    )

    def rows() -> bytes:
        # Built row by row in a thread: a single step would hold the interpreter for a tenth of a
        # second.
        custom = {model.wish.image for model in [*fleet.models.values()] if model.wish.image}
        images = profiles.images | custom
        shipped = [(None, fact) for fact in profiles.facts]
        views = (
            FactView(id=id_, stale=stale_reason(fact, hardware.driver, images), fact=fact)
            for id_, fact in [*shipped, *learned_facts]
        )
        data = b",".join(view.model_dump_json().encode() for view in views)
        return b'{"data":[%b],"problem":%b}' % (data, json.dumps(learned_facts.problem).encode())

    return Response(await asyncio.to_thread(rows), media_type="application/json")


@router.post("", status_code=201, responses=errors(Conflict, StoreError))
async def import_facts(request: Request, body: FactsImport) -> dict[str, int]:
    """Add facts that another gateway learned. Facts that exist already are not added again."""
    gateway = gateway_of(request)
    store = gateway.store
    store.changeable()
    if (
        sum((await asyncio.to_thread(store.fact_counts)).values()) + len(body.facts)
        > _MAX_STORED_FACTS
    ):
        raise Conflict(
            f"The gateway keeps at most {_MAX_STORED_FACTS} facts, because every plan reads them"
            " all.",
            hint=(
                "`fitserve facts ls` lists the facts; remove stale ones with `fitserve facts rm`."
            ),
        )
    added = await asyncio.to_thread(store.add_facts, body.facts)
    wake = gateway.loop.wake
    wake()
    return {"added": added}


@router.delete("/{number}", responses=errors(NotFound, StoreError))
async def drop_fact(
    request: Request, number: Annotated[int, Path(ge=1, le=_MAX_ROW_ID)]
) -> dict[str, Any]:
    """Remove one fact. Plans that it excluded become possible again."""
    gateway = gateway_of(request)
    store = gateway.store
    store.changeable()
    await asyncio.to_thread(store.remove_fact, number)
    wake = gateway.loop.wake
    wake()
    return {"id": number, "state": "removed"}
