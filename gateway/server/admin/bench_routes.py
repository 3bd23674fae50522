"""The admin API of measurements: keep one that `fitserve bench` made, list those that are kept."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from gateway.domain import Bench, BenchKept, BenchReport, Rival, Value
from gateway.errors import Conflict, NotFound, StoreError
from gateway.planner.explain import rival_words
from gateway.proxy.api.error_bodies import errors

router = APIRouter(prefix="/admin/models", tags=["admin"])


class RivalView(Value):
    """Another plan that should be better than what runs."""

    words: str
    do: str
    gain: float = Field(description="how many times as good, for what the model is for")
    fingerprint: str
    engine: str


class BenchView(Value):
    """What became of a measurement."""

    bench: Bench
    last: Bench | None = Field(None, description="the measurement before")
    not_learned: str = Field("", description='why nothing is learned from it; "": something was')
    rival: RivalView | None = None


class BenchList(Value):
    data: tuple[Bench, ...]


def rival_view(name: str, rival: Rival | None) -> RivalView | None:
    if rival is None:
        return None
    plan = rival.plan
    engine, ranks = str(plan.engine), plan.tensor_parallel.value
    return RivalView(
        words=rival_words(rival),
        do=(
            "FITSERVE_AUTO_TUNE=true has the gateway try it in a quiet hour; or `fitserve set"
            f" {name} --engine {engine} --tp {ranks}`."
        ),
        gain=rival.gain,
        fingerprint=plan.fingerprint,
        engine=engine,
    )


@router.post(
    "/{name:path}/bench", status_code=201, responses=errors(NotFound, Conflict, StoreError)
)
async def keep_bench(request: Request, name: str, body: BenchReport) -> BenchView:
    """Keep what was measured of the model, and learn from it what such plans do here. It has to be
    of the plan that runs."""
    kept: BenchKept = await request.app.state.tuner.store_report(name, body)
    rival = request.app.state.fleet.model(name).rival
    return BenchView(
        bench=kept.bench, last=kept.last, not_learned=kept.why, rival=rival_view(name, rival)
    )


@router.get("/{name:path}/bench", responses=errors(NotFound))
async def list_benches(request: Request, name: str) -> BenchList:
    """What was measured of the model, oldest first."""
    state: Any = request.app.state
    state.fleet.model(name)
    return BenchList(data=tuple(await asyncio.to_thread(state.store.benches, name)))
