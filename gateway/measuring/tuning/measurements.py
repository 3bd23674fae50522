"""Keeps measurements of served models, and compares their plans with others.

A plan that should be better is shown with the model (`rival`); a search proves it: `plan_search`.
"""

from __future__ import annotations

import asyncio
import time

from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import ManagedModel
from gateway.controller.plan_preview import PlanPreview
from gateway.diagnosis.facts.known_facts import KnownFacts
from gateway.domain import Attempt, Bench, BenchReport, Plan, Speed, StoredBench
from gateway.engines.common.speed.correction import correct_by_measurement, learn_from_bench
from gateway.engines.common.speed.expectation import scale_speed
from gateway.errors import Conflict, FitserveError
from gateway.logging import Logger
from gateway.measuring.tuning.engine_traffic import ServedTraffic
from gateway.planner.explain import rival_words
from gateway.store.store import Store
from gateway.supervision import SupervisedTask

log = Logger("fitserve.tuning")

# Seconds between two checks of all models.
_LOOK_S = 2.0


class Measurements:
    """Keeps measurements of served models and tried plans, and compares plans."""

    def __init__(
        self, fleet: Fleet, plan_preview: PlanPreview, store: Store, traffic: ServedTraffic
    ) -> None:
        self._fleet = fleet
        self._plan_preview = plan_preview
        self._store = store
        self._traffic = traffic
        self._compared_plans: dict[str, str] = {}
        """The serving plan by model, after its comparison with others."""
        self._watching = SupervisedTask(self._learn_measurements, "comparing plans")

    async def close(self) -> None:
        await self._watching.close()

    async def store_report(self, name: str, report: BenchReport) -> StoredBench:
        """Store a measurement, learn from it, and compare the plan with others. Raises NotFound,
        Conflict, StoreError."""
        self._store.changeable()
        model = self._fleet.model(name)
        serving_attempts = model.serving
        plans = [attempt.fingerprint for attempt in serving_attempts]
        if report.fingerprint not in plans if plans else report.fingerprint is not None:
            raise Conflict(
                f"The plan of {name} changed since it was measured.",
                hint=f"The result was not stored. Run `fitserve bench {name}` again.",
            )
        result = await self._store_report(
            name,
            serving_attempts[0].plan if serving_attempts else None,
            report,
            _unusable_reason(serving_attempts, report),
        )
        if not result.why:
            await self._compare_plans(model, serving_attempts[0])
        return result

    async def store_measurement(self, model: ManagedModel, plan: Plan, report: BenchReport) -> None:
        """Learn from the measurement of one copy of a plan, and compare the served plan again.

        The measurement of a served plan is also one of the model. Raises StoreError.
        """
        single_plan = scale_speed(plan, 1)
        name = model.wish.name
        attempt = next((attempt for attempt in model.serving if attempt.plan == plan), None)
        if attempt is not None:
            await self._store_report(name, single_plan, report)
        else:
            # Another plan's figures are not a measurement of this model.
            fields = {**report.model_dump(), "model": name, "at": time.time()}
            facts_stored = await asyncio.to_thread(self._store.facts)
            facts = learn_from_bench(
                single_plan, Bench.model_validate(fields), facts_stored, time.time()
            )
            await asyncio.to_thread(self._store.learn_speeds, facts)
        if model.serving:
            await self._compare_plans(model, model.serving[0])
        else:
            # Compared when it serves again.
            self._compared_plans.pop(name, None)

    async def tried_speed(self, plan: Plan) -> Speed | None:
        """The speed of all copies of a plan, if it was measured earlier."""
        speed = (await self._measured_plan(plan)).speed
        return speed if speed is not None and speed.grade == "measured" else None

    async def _store_report(
        self, name: str, plan: Plan | None, report: BenchReport, reason: str = ""
    ) -> StoredBench:
        now_s = time.time()
        fields = {
            **report.model_dump(),
            "model": name,
            "at": now_s,
            "engine": str(plan.engine) if plan else None,
        }
        bench = Bench.model_validate(fields)
        earlier_benches, facts_known = await asyncio.gather(
            asyncio.to_thread(self._store.benches, name), asyncio.to_thread(self._store.facts)
        )
        facts = () if reason or plan is None else learn_from_bench(plan, bench, facts_known, now_s)
        await asyncio.to_thread(self._store.add_bench, bench, facts)
        log.info(
            "measured", model=name, stream=bench.stream, learned=len(facts), why=reason or None
        )
        return StoredBench(bench, earlier_benches[-1] if earlier_benches else None, reason)

    async def _learn_measurements(self) -> float:
        for name, model in list(self._fleet.models.items()):
            serving_attempts = model.serving
            if (
                serving_attempts
                and self._compared_plans.get(name) != serving_attempts[0].fingerprint
            ):
                self._compared_plans[name] = serving_attempts[0].fingerprint
                await self._compare_plans(model, serving_attempts[0])
            if serving_attempts:
                await self._learn(model)
        self._traffic.forget()
        self._compared_plans = {
            name: plan for name, plan in self._compared_plans.items() if name in self._fleet.models
        }
        return _LOOK_S

    async def _measured_plan(self, plan: Plan) -> Plan:
        """The plan with its measured speed, where it or one copy of it was measured."""
        facts = KnownFacts(await asyncio.to_thread(self._store.facts))
        single_plan = scale_speed(plan, 1)
        for form in (plan, single_plan):
            measured_form = correct_by_measurement(form, facts.select_plan(form.fingerprint))
            if measured_form.speed is not None and measured_form.speed.grade != "predicted":
                return scale_speed(measured_form, plan.replicas.value)
        return plan

    async def _compare_plans(self, model: ManagedModel, serving_attempt: Attempt) -> None:
        """Update the measured speed of the serving plan and the better plan, if any."""
        name = model.wish.name
        measured_plan = await self._measured_plan(serving_attempt.plan)
        model.measured_plan = (
            measured_plan
            if measured_plan.speed is not None and measured_plan.speed.grade != "predicted"
            else None
        )
        try:
            rival = None
            if model.measured_plan is not None:
                rival = (
                    await self._plan_preview.plan_against_running(model, model.measured_plan)
                ).rival
        except FitserveError as error:
            log.info("the plan could not be compared with others", model=name, reason=str(error))
            rival = None
        if rival is not None and (
            model.rival is None or model.rival.plan.fingerprint != rival.plan.fingerprint
        ):
            log.warning(
                "another plan should be better",
                model=name,
                gain=rival.gain,
                words=rival_words(rival),
            )
        model.rival = rival

    async def _learn(self, model: ManagedModel) -> None:
        """Learn from the traffic of clients."""
        await self._traffic.read(model)
        stretches = self._traffic.due(model)
        if not stretches or not (serving_attempts := model.serving):
            return
        try:
            compared = await self._plan_preview.plan_against_running(
                model, serving_attempts[0].plan, stretches
            )
            if not compared.learned:
                return
            await asyncio.to_thread(self._store.learn_speeds, compared.learned)
        except FitserveError as error:
            log.info(
                "nothing was learned from client traffic",
                model=model.wish.name,
                reason=str(error),
            )
            return
        parts = {fact.scope["figure"]: (fact.value or 0) / 1000 for fact in compared.learned}
        log.info(
            "learned from client traffic",
            model=model.wish.name,
            stretches=len(stretches),
            **parts,
        )
        await self._compare_plans(model, serving_attempts[0])


def _unusable_reason(serving_attempts: list[Attempt], report: BenchReport) -> str:
    """The reason why nothing can be learned from the measurement, or an empty string."""
    if report.disturbed:
        return report.disturbed
    if not serving_attempts:
        return "the plan of an endpoint is unknown"
    planned_replicas = serving_attempts[0].plan.replicas.value
    if len(serving_attempts) != planned_replicas:
        return f"only {len(serving_attempts)} of {planned_replicas} replicas serve"
    return ""
