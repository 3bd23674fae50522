"""Takes measurements of served models in, and says where another plan should be better than what runs."""

from __future__ import annotations

import asyncio
import time

import structlog

from gateway.controller.loop import Loop
from gateway.controller.managed_model import ManagedModel
from gateway.core.planner.explain import rival_words
from gateway.core.speed.correction import learned
from gateway.domain import Attempt, Bench, BenchKept, BenchReport
from gateway.errors import Conflict, FitserveError
from gateway.store.store import Store
from gateway.supervision import Supervised

log = structlog.get_logger("fitserve.tuning")

# Between two looks at which models serve by a plan that was not judged yet.
_LOOK_S = 5.0


class Tuner:
    def __init__(self, loop: Loop, store: Store) -> None:
        self._loop = loop
        self._store = store
        self._judged: dict[str, str] = {}
        """By model, the plan that serves, once it was compared with others."""
        self._watching = Supervised(self._look, "comparing plans")

    async def close(self) -> None:
        await self._watching.close()

    async def take(self, name: str, report: BenchReport) -> BenchKept:
        """Keep a measurement, learn from it, and compare the plan anew. Raises NotFound, Conflict, StoreError."""
        self._store.changeable()
        model = self._loop.model(name)
        serving = model.serving
        plans = [attempt.fingerprint for attempt in serving]
        if report.fingerprint not in plans if plans else report.fingerprint is not None:
            raise Conflict(
                f"{name} does not run any more as it did when it was measured.",
                hint=f"Nothing was kept; `fitserve bench {name}` measures it again.",
            )
        now = time.time()
        fields, engine = report.model_dump(), str(serving[0].plan.engine) if serving else None
        bench = Bench.model_validate({**fields, "model": name, "at": now, "engine": engine})
        why = _unusable(serving, bench)
        kept, known = await asyncio.gather(asyncio.to_thread(self._store.benches, name), asyncio.to_thread(self._store.facts))
        facts = () if why else learned(serving[0].plan, bench, known, now)
        await asyncio.to_thread(self._store.add_bench, bench, facts)
        log.info("measured", model=name, stream=bench.stream, learned=len(facts), why=why or None)
        if facts:
            await self._judge(model)
        return BenchKept(bench, kept[-1] if kept else None, why)

    async def _look(self) -> float:
        for name, model in list(self._loop.models.items()):
            serving = model.serving
            if serving and self._judged.get(name) != serving[0].fingerprint:
                self._judged[name] = serving[0].fingerprint
                model.rival = None
                if await self._measured(serving[0].fingerprint):
                    await self._judge(model)
        self._judged = {name: plan for name, plan in self._judged.items() if name in self._loop.models}
        return _LOOK_S

    async def _measured(self, fingerprint: str) -> bool:
        facts = await asyncio.to_thread(self._store.fact_texts)
        return any(fingerprint in fact and "speed_measured" in fact for fact in facts)

    async def _judge(self, model: ManagedModel) -> None:
        """Say it where another plan should be better."""
        name = model.wish.name
        try:
            found = await self._loop.rival(model)
        except FitserveError as error:
            log.info("the plan could not be compared with others", model=name, reason=str(error))
            found = None
        if found is not None and (model.rival is None or model.rival.plan.fingerprint != found.plan.fingerprint):
            log.warning("another plan should be better", model=name, gain=found.gain, words=rival_words(found))
        model.rival = found


def _unusable(serving: list[Attempt], bench: Bench) -> str:
    """Why nothing can be learned from the measurement; "" where something can."""
    if bench.disturbed:
        return bench.disturbed
    if not serving:
        return "it is an endpoint, whose plan is not known"
    planned = serving[0].plan.replicas.value
    if len(serving) != planned:
        return f"{len(serving)} of {planned} replicas serve"
    return ""
