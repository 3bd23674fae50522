"""Keeps measurements of served models and compares their plans with others.

With FITSERVE_AUTO_TUNE better plans are tried while a model is quiet:

    serves, not measured            measure it
    serves, another plan is better  try it: beside the engine where memory allows, else in its place
    tried beside, ready, quiet      measure it; the better plan serves, the other engine stops
    tried beside, a request came    stop the trial until the model is quiet again
    tried in its place              a start like any other; after a failure the earlier plan is the
                                    best known one; if it is not better, the earlier plan is put
                                    back in the same way

The state of all this is attempts and facts, so a restarted gateway continues.
"""

from __future__ import annotations

import asyncio
import time

from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.plan_preview import PlanPreview
from gateway.controller.steps.launcher import Launcher
from gateway.controller.steps.trial_steps import TrialSteps
from gateway.diagnosis.facts.known_facts import KnownFacts
from gateway.domain import Attempt, Bench, BenchKept, BenchReport, Plan, Rival
from gateway.engines.common.speed.correction import learned, measured
from gateway.engines.common.speed.expectation import for_copies
from gateway.errors import Conflict, FitserveError
from gateway.logging import Logger
from gateway.measuring.tuning.engine_load import measure
from gateway.measuring.tuning.traffic import ServedTraffic
from gateway.planner.explain import rival_words
from gateway.store.store import Store
from gateway.supervision import SupervisedTask

log = Logger("fitserve.tuning")

# Seconds between two checks of all models.
_LOOK_S = 2.0
# Seconds until an action without a result may be repeated.
_REPEAT_S = 3600.0
# Seconds for each number of concurrent requests.
_MEASURED_S = 5.0


class Tuner:
    """Keeps measurements of served models, compares plans, and tries better ones where allowed."""

    def __init__(
        self,
        fleet: Fleet,
        plan_preview: PlanPreview,
        trials: TrialSteps,
        launcher: Launcher,
        store: Store,
        traffic: ServedTraffic,
    ) -> None:
        self._fleet = fleet
        self._plan_preview = plan_preview
        self._trials = trials
        self._launcher = launcher
        self._store = store
        self._settings = launcher.settings
        self._traffic = traffic
        self._compared_plans: dict[str, str] = {}
        """The serving plan by model, after its comparison with others."""
        self._last_requests: dict[str, tuple[float, float]] = {}
        """By model: ended requests at the last request, and its time."""
        self._measured_fingerprints: set[str] = set()
        self._actions: dict[tuple[str, str], float] = {}
        """The time of each action in the current quiet period, by model and action."""
        self._watching = SupervisedTask(self._look, "comparing plans")

    async def close(self) -> None:
        await self._watching.close()

    async def store_report(self, name: str, report: BenchReport) -> BenchKept:
        """Store a measurement, learn from it, and compare the plan with others. Raises NotFound,
        Conflict, StoreError."""
        self._store.changeable()
        model = self._fleet.model(name)
        serving = model.serving
        plans = [attempt.fingerprint for attempt in serving]
        if report.fingerprint not in plans if plans else report.fingerprint is not None:
            raise Conflict(
                f"The plan of {name} changed since it was measured.",
                hint=f"The result was not stored. Run `fitserve bench {name}` again.",
            )
        result = await self._store_report(
            name, serving[0].plan if serving else None, report, _unusable(serving, report)
        )
        if not result.why:
            await self._compare_plans(model, serving[0])
        return result

    async def _store_report(
        self, name: str, plan: Plan | None, report: BenchReport, why: str = ""
    ) -> BenchKept:
        now_s = time.time()
        fields = {
            **report.model_dump(),
            "model": name,
            "at": now_s,
            "engine": str(plan.engine) if plan else None,
        }
        bench = Bench.model_validate(fields)
        earlier, facts_known = await asyncio.gather(
            asyncio.to_thread(self._store.benches, name), asyncio.to_thread(self._store.facts)
        )
        facts = () if why or plan is None else learned(plan, bench, facts_known, now_s)
        await asyncio.to_thread(self._store.add_bench, bench, facts)
        log.info("measured", model=name, stream=bench.stream, learned=len(facts), why=why or None)
        return BenchKept(bench, earlier[-1] if earlier else None, why)

    async def _look(self) -> float:
        for name, model in list(self._fleet.models.items()):
            serving = model.serving
            if serving and self._compared_plans.get(name) != serving[0].fingerprint:
                self._compared_plans[name] = serving[0].fingerprint
                await self._compare_plans(model, serving[0])
            if serving:
                await self._learn(model)
            free = not (model.deleting or model.unsettled or model.tuned)
            if self._settings.auto_tune and free:
                await self._tune(model)
        self._traffic.forget()
        self._compared_plans = {
            name: plan for name, plan in self._compared_plans.items() if name in self._fleet.models
        }
        self._last_requests = {
            name: last_request
            for name, last_request in self._last_requests.items()
            if name in self._fleet.models
        }
        return _LOOK_S

    async def _measured_plan(self, plan: Plan) -> Plan:
        """The plan with its measured speed, where there is one."""
        facts = await asyncio.to_thread(self._store.facts)
        return measured(plan, KnownFacts(facts).of_plan(plan.fingerprint))

    async def _compare_plans(self, model: ManagedModel, serving: Attempt) -> None:
        """Update the measured speed of the serving plan and the better plan, if any."""
        name, measured_plan = model.wish.name, await self._measured_plan(serving.plan)
        model.measured = (
            measured_plan
            if measured_plan.speed is not None and measured_plan.speed.grade != "predicted"
            else None
        )
        try:
            rival = await self._rival(model, serving) if model.measured is not None else None
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

    async def _rival(
        self,
        model: ManagedModel,
        attempt: Attempt,
        replica: ReplicaState | None = None,
        *,
        beside: bool = False,
    ) -> Rival | None:
        """A better plan. replica: compare by this replica alone, of several."""
        plan = for_copies(attempt.plan, 1) if replica is not None else attempt.plan
        return (await self._plan_preview.compared(model, plan, replica, beside=beside)).rival

    async def _learn(self, model: ManagedModel) -> None:
        """Learn from the traffic of clients."""
        await self._traffic.read(model)
        stretches = self._traffic.due(model)
        if not stretches or not (serving := model.serving):
            return
        try:
            compared = await self._plan_preview.compared(model, serving[0].plan, traffic=stretches)
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
        await self._compare_plans(model, serving[0])

    # --- trying other plans ---

    async def _tune(self, model: ManagedModel) -> None:
        """Take the next step towards a better plan, replica by replica."""
        name, trial = model.wish.name, model.trial
        quiet_s, busy = self._quiet_s(name), any(replica.busy for replica in model.replicas)
        try:
            if trial is not None and trial.attempt is not None:
                old = model.replicas[trial.index].attempt
                if quiet_s < time.time() - trial.attempt.started_at:
                    log.info("trial of another plan stopped for a request", model=name)
                    await self._trials.settle(model, adopt=False)
                elif trial.attempt.state == "ready" and old is not None and old.state == "ready":
                    await self._finish_trial(model, model.replicas[trial.index], old, trial.attempt)
            elif trial is None and quiet_s >= self._settings.auto_tune_quiet_s and not busy:
                for replica in model.replicas:
                    attempt = replica.attempt
                    if (
                        attempt is None
                        or not attempt.serves
                        or await self._improve(model, replica, attempt)
                    ):
                        break
        except FitserveError as error:
            log.warning("another plan could not be tried", model=name, reason=str(error))

    async def _improve(self, model: ManagedModel, replica: ReplicaState, attempt: Attempt) -> bool:
        """Whether the replica is being measured or replaced."""
        name, replica_alone = model.wish.name, _replica_alone(model, replica)
        if attempt.fingerprint not in self._measured_fingerprints:
            if _is_measured(await self._measured_plan(for_copies(attempt.plan, 1))):
                self._measured_fingerprints.add(attempt.fingerprint)
            elif not self._begin_action(name, f"measure {attempt.fingerprint}"):
                return False
            else:
                report = await self._measure(model, attempt)
                if report is not None:
                    await self._store_report(name, for_copies(attempt.plan, 1), report)
                    await self._compare_plans(model, (model.serving or [attempt])[0])
            return True
        if replica_alone is None and model.rival is None:
            return False
        if replica_alone is not None and not self._begin_action(
            name, f"compare {attempt.fingerprint}"
        ):
            return False
        # Compared again, as failures and measurements may be newer than the last comparison.
        rival_beside = await self._rival(model, attempt, replica_alone, beside=True)
        rival = rival_beside or await self._rival(model, attempt, replica_alone)
        if replica_alone is None:
            model.rival = rival
        if rival is None or not self._begin_action(name, f"try {rival.plan.fingerprint}"):
            return False
        log.warning(
            "another plan is tried",
            model=name,
            replica=replica.index,
            beside=rival_beside is not None,
            words=rival_words(rival),
        )
        plan = (
            for_copies(rival.plan, attempt.plan.replicas.value)
            if replica_alone is not None
            else rival.plan
        )
        await self._trials.begin(model, replica, plan, beside=rival_beside is not None)
        return True

    async def _finish_trial(
        self, model: ManagedModel, replica: ReplicaState, old: Attempt, new: Attempt
    ) -> None:
        """Measure the tried plan, and keep the one with the better measurement."""
        report = await self._measure(model, new)
        if report is None:
            await self._trials.settle(model, adopt=False)
            return
        ours, tried, better = for_copies(old.plan, 1), for_copies(new.plan, 1), None
        try:
            await self._store_report(model.wish.name, tried, report)
            better = (
                await self._plan_preview.compared(
                    model, ours, _replica_alone(model, replica), compare_with=tried
                )
            ).rival
        finally:
            log.warning(
                "another plan was tried",
                model=model.wish.name,
                better=better is not None,
                gain=better.gain if better else None,
            )
            await self._trials.settle(model, adopt=better is not None)
        # The new facts may change the comparison with other plans.
        self._compared_plans.pop(model.wish.name, None)
        self._actions.pop((model.wish.name, f"compare {old.fingerprint}"), None)

    async def _measure(self, model: ManagedModel, attempt: Attempt) -> BenchReport | None:
        instance = await self._launcher.instance(attempt)
        if instance is None or instance.url is None:
            return None
        name, at_start = model.wish.name, self._last_requests.get(model.wish.name)

        def busy() -> bool:
            self._quiet_s(name)
            return self._last_requests.get(name) != at_start

        return await measure(
            attempt.evolve(plan=for_copies(attempt.plan, 1)), instance, busy, _MEASURED_S
        )

    def _begin_action(self, name: str, action: str) -> bool:
        """Whether the action was not done lately. An interrupted action may be repeated in the next
        quiet period."""
        self._actions = {
            key: time_s
            for key, time_s in self._actions.items()
            if time.monotonic() - time_s < _REPEAT_S
        }
        now_s = time.monotonic()
        return self._actions.setdefault((name, action), now_s) == now_s

    def _quiet_s(self, name: str) -> float:
        """Seconds since the last request; running requests count as now."""
        ended, now_s = self._traffic.request_counts().get(name, 0.0), time.monotonic()
        last_count, last_s = self._last_requests.get(name, (-1.0, now_s))
        if ended != last_count or self._traffic.is_working(name):
            last_count, last_s = ended, now_s
            self._actions = {key: time_s for key, time_s in self._actions.items() if key[0] != name}
        self._last_requests[name] = last_count, last_s
        return now_s - last_s


def _replica_alone(model: ManagedModel, replica: ReplicaState) -> ReplicaState | None:
    """The replica, if the model has several: then plans are compared by one replica."""
    return replica if len(model.replicas) > 1 else None


def _is_measured(plan: Plan) -> bool:
    return plan.speed is not None and plan.speed.grade == "measured"


def _unusable(serving: list[Attempt], report: BenchReport) -> str:
    """The reason why nothing can be learned from the measurement, or an empty string."""
    if report.disturbed:
        return report.disturbed
    if not serving:
        return "the plan of an endpoint is unknown"
    planned = serving[0].plan.replicas.value
    if len(serving) != planned:
        return f"only {len(serving)} of {planned} replicas serve"
    return ""
