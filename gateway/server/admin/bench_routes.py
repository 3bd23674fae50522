"""The admin API of measurements: store results of `fitserve bench`, and list them."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from pydantic import Field

from gateway.domain import Bench, BenchReport, Rival, StoredBench, Value
from gateway.errors import Conflict, NotFound, StoreError
from gateway.planner.explain import rival_words
from gateway.proxy.api.error_bodies import errors
from gateway.server.gateway_parts import gateway_of

router = APIRouter(prefix="/admin/models", tags=["admin"])


class RivalView(Value):
    """Another plan that is probably better than the running plan."""

    words: str
    command: str
    gain: float = Field(description="factor of improvement for the model's objective")
    fingerprint: str
    engine: str


class BenchView(Value):
    """Result of storing a measurement."""

    bench: Bench
    last: Bench | None = Field(None, description="the previous measurement")
    not_learned: str = Field(
        "", description='cause why nothing is learned from it; "": a fact was learned'
    )
    rival: RivalView | None = None


class BenchList(Value):
    data: tuple[Bench, ...]
    problem: str = Field("", description="sentence on measurements that are left out; empty: none")


def rival_view(name: str, rival: Rival | None) -> RivalView | None:
    if rival is None:
        return None
    plan = rival.plan
    engine = str(plan.engine)
    ranks = plan.tensor_parallel.value
    return RivalView(
        words=rival_words(rival),
        command=(
            f"`fitserve tune {name}` tries it, or FITSERVE_AUTO_TUNE=true while the model is idle;"
            f" or `fitserve set {name} --engine {engine} --tp {ranks}`."
        ),
        gain=rival.gain,
        fingerprint=plan.fingerprint,
        engine=engine,
    )


@router.post(
    "/{name:path}/bench", status_code=201, responses=errors(NotFound, Conflict, StoreError)
)
async def store_bench(request: Request, name: str, body: BenchReport) -> BenchView:
    """Store a measurement of the running plan of a model, and learn from it."""
    gateway = gateway_of(request)
    kept_bench: StoredBench = await gateway.tuning.measurements.store_report(name, body)
    rival = gateway.loop.fleet.model(name).rival
    return BenchView(
        bench=kept_bench.bench,
        last=kept_bench.last,
        not_learned=kept_bench.why,
        rival=rival_view(name, rival),
    )


@router.get("/{name:path}/bench", responses=errors(NotFound))
async def list_benches(request: Request, name: str) -> BenchList:
    """The measurements of the model, oldest first."""
    gateway = gateway_of(request)
    gateway.loop.fleet.model(name)
    benches = await asyncio.to_thread(gateway.store.benches, name)
    return BenchList(data=tuple(benches), problem=benches.problem)
