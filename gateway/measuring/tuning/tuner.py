"""Takes measurements of served models in, says where another plan should be better than what runs,
and tries it where that is allowed.

    serves, quiet for long     what serves is not measured yet     measure it
                               another plan should be better       try it: beside what serves where there is room, else in its place
    tried beside, ready        quiet                               measure it; the better one serves, the other stops
                               a request came                      it stops, until it is quiet again
    tried in its place         as any start: where it fails the plan from before is the best that is known; where it is not better, that one is
                               what should be better, and is put back in the same way

What is known of this is attempts and facts alone, so a gateway that dies anywhere goes on by them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.plan_preview import PlanPreview
from gateway.controller.steps.launcher import Launcher
from gateway.controller.steps.trial_steps import TrialSteps
from gateway.diagnosis.facts.known_facts import KnownFacts
from gateway.domain import Attempt, Bench, BenchKept, BenchReport, Engine, EngineRef, Plan, Rival
from gateway.engines.common.speed.correction import learned, measured
from gateway.engines.common.speed.expectation import for_copies
from gateway.errors import Conflict, FitserveError
from gateway.logging import Logger
from gateway.measuring.tuning.engine_load import measure
from gateway.measuring.tuning.traffic import Traffic
from gateway.planner.explain import rival_words
from gateway.store.store import Store
from gateway.supervision import Supervised

log = Logger("fitserve.tuning")

# Between two looks at what serves.
_LOOK_S = 2.0
# What came to nothing, for a reason that teaches nothing, is done again after so long.
_AGAIN_S = 3600.0
# For each number of requests at once.
_MEASURED_S = 5.0


class Tuner:
    """working: as of `Routes`. asked: requests that ended, by model. profile: what is known of an
    engine version."""

    def __init__(
        self,
        fleet: Fleet,
        plan_preview: PlanPreview,
        trials: TrialSteps,
        launcher: Launcher,
        store: Store,
        working: Callable[[str], bool],
        asked: Callable[[], Mapping[str, float]],
        profile: Callable[[EngineRef], Engine],
    ) -> None:
        self._fleet = fleet
        self._plan_preview = plan_preview
        self._trials = trials
        self._launcher = launcher
        self._working = working
        self._store = store
        self._settings = launcher.settings
        self._asked = asked
        self._traffic = Traffic(fleet.models, working, asked, profile)
        self._judged: dict[str, str] = {}
        """By model, the plan that serves, once it was compared with others."""
        self._heard: dict[str, tuple[float, float]] = {}
        """By model, how many requests had ended when the last one was seen, and when that was."""
        self._measured: set[str] = set()
        self._done: dict[tuple[str, str], float] = {}
        """By model and what, when it was done in this quiet hour."""
        self._watching = Supervised(self._look, "comparing plans")

    async def close(self) -> None:
        await self._watching.close()

    async def take(self, name: str, report: BenchReport) -> BenchKept:
        """Keep a measurement, learn from it, and compare the plan anew. Raises NotFound, Conflict,
        StoreError."""
        self._store.changeable()
        model = self._fleet.model(name)
        serving = model.serving
        plans = [attempt.fingerprint for attempt in serving]
        if report.fingerprint not in plans if plans else report.fingerprint is not None:
            raise Conflict(
                f"{name} does not run any more as it did when it was measured.",
                hint=f"Nothing was kept; `fitserve bench {name}` measures it again.",
            )
        kept = await self._keep(
            name, serving[0].plan if serving else None, report, _unusable(serving, report)
        )
        if not kept.why:
            await self._judge(model, serving[0])
        return kept

    async def _keep(
        self, name: str, plan: Plan | None, report: BenchReport, why: str = ""
    ) -> BenchKept:
        now = time.time()
        fields = {
            **report.model_dump(),
            "model": name,
            "at": now,
            "engine": str(plan.engine) if plan else None,
        }
        bench = Bench.model_validate(fields)
        before, known = await asyncio.gather(
            asyncio.to_thread(self._store.benches, name), asyncio.to_thread(self._store.facts)
        )
        facts = () if why or plan is None else learned(plan, bench, known, now)
        await asyncio.to_thread(self._store.add_bench, bench, facts)
        log.info("measured", model=name, stream=bench.stream, learned=len(facts), why=why or None)
        return BenchKept(bench, before[-1] if before else None, why)

    async def _look(self) -> float:
        for name, model in list(self._fleet.models.items()):
            serving = model.serving
            if serving and self._judged.get(name) != serving[0].fingerprint:
                self._judged[name] = serving[0].fingerprint
                await self._judge(model, serving[0])
            if serving:
                await self._learn(model)
            if self._settings.auto_tune and not model.deleting and not model.unsettled:
                await self._tune(model)
        self._traffic.forget()
        self._judged = {
            name: plan for name, plan in self._judged.items() if name in self._fleet.models
        }
        self._heard = {
            name: heard for name, heard in self._heard.items() if name in self._fleet.models
        }
        return _LOOK_S

    async def _known(self, plan: Plan) -> Plan:
        """The plan with its own figures, as far as they were measured."""
        facts = await asyncio.to_thread(self._store.facts)
        return measured(plan, KnownFacts(facts).about_plan(plan.fingerprint))

    async def _judge(self, model: ManagedModel, serving: Attempt) -> None:
        """Say what was measured of what serves, and where another plan should be better."""
        name, known = model.wish.name, await self._known(serving.plan)
        model.measured = (
            known if known.speed is not None and known.speed.grade != "predicted" else None
        )
        try:
            found = await self._rival(model, serving) if model.measured is not None else None
        except FitserveError as error:
            log.info("the plan could not be compared with others", model=name, reason=str(error))
            found = None
        if found is not None and (
            model.rival is None or model.rival.plan.fingerprint != found.plan.fingerprint
        ):
            log.warning(
                "another plan should be better",
                model=name,
                gain=found.gain,
                words=rival_words(found),
            )
        model.rival = found

    async def _rival(
        self,
        model: ManagedModel,
        attempt: Attempt,
        replica: ReplicaState | None = None,
        *,
        beside: bool = False,
    ) -> Rival | None:
        """replica: of this one alone, where the model has several."""
        plan = for_copies(attempt.plan, 1) if replica is not None else attempt.plan
        return (await self._plan_preview.compared(model, plan, replica, beside=beside)).rival

    async def _learn(self, model: ManagedModel) -> None:
        """From what clients are served meanwhile."""
        await self._traffic.read(model)
        seen = self._traffic.due(model)
        if not seen or not (serving := model.serving):
            return
        try:
            compared = await self._plan_preview.compared(model, serving[0].plan, seen=seen)
            if not compared.learned:
                return
            await asyncio.to_thread(self._store.learn_speeds, compared.learned)
        except FitserveError as error:
            log.info(
                "nothing was learned from what clients are served",
                model=model.wish.name,
                reason=str(error),
            )
            return
        parts = {fact.scope["figure"]: (fact.value or 0) / 1000 for fact in compared.learned}
        log.info(
            "learned from what clients are served",
            model=model.wish.name,
            stretches=len(seen),
            **parts,
        )
        await self._judge(model, serving[0])

    # --- trying other plans ---

    async def _tune(self, model: ManagedModel) -> None:
        """The next step towards better plans, replica by replica."""
        name, trial = model.wish.name, model.trial
        quiet_s, busy = self._quiet_s(name), any(replica.busy for replica in model.replicas)
        try:
            if trial is not None and trial.attempt is not None:
                old = model.replicas[trial.index].attempt
                if quiet_s < time.time() - trial.attempt.started_at:
                    log.info("another plan is not tried on, for a request came", model=name)
                    await self._trials.settle(model, adopt=False)
                elif trial.attempt.state == "ready" and old is not None and old.state == "ready":
                    await self._compare(model, model.replicas[trial.index], old, trial.attempt)
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
        """Whether something was done about the replica."""
        name, alone = model.wish.name, _alone(model, replica)
        if attempt.fingerprint not in self._measured:
            if _is_measured(await self._known(for_copies(attempt.plan, 1))):
                self._measured.add(attempt.fingerprint)
            elif not self._may(name, f"measure {attempt.fingerprint}"):
                return False
            else:
                report = await self._measure(model, attempt)
                if report is not None:
                    await self._keep(name, for_copies(attempt.plan, 1), report)
                    await self._judge(model, (model.serving or [attempt])[0])
            return True
        if alone is None and model.rival is None:
            return False
        if alone is not None and not self._may(name, f"compare {attempt.fingerprint}"):
            return False
        # Anew, for what failed or was measured meanwhile is known by now.
        beside = await self._rival(model, attempt, alone, beside=True)
        found = beside or await self._rival(model, attempt, alone)
        if alone is None:
            model.rival = found
        if found is None or not self._may(name, f"try {found.plan.fingerprint}"):
            return False
        log.warning(
            "another plan is tried",
            model=name,
            replica=replica.index,
            beside=beside is not None,
            words=rival_words(found),
        )
        plan = (
            for_copies(found.plan, attempt.plan.replicas.value) if alone is not None else found.plan
        )
        await self._trials.begin(model, replica, plan, beside=beside is not None)
        return True

    async def _compare(
        self, model: ManagedModel, replica: ReplicaState, old: Attempt, new: Attempt
    ) -> None:
        """Measure what is tried; what is better by what was measured of both serves."""
        report = await self._measure(model, new)
        if report is None:
            await self._trials.settle(model, adopt=False)
            return
        ours, other, better = for_copies(old.plan, 1), for_copies(new.plan, 1), None
        try:
            await self._keep(model.wish.name, other, report)
            better = (
                await self._plan_preview.compared(
                    model, ours, _alone(model, replica), against=other
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
        # What was learned may have changed what else should be better.
        self._judged.pop(model.wish.name, None)
        self._done.pop((model.wish.name, f"compare {old.fingerprint}"), None)

    async def _measure(self, model: ManagedModel, attempt: Attempt) -> BenchReport | None:
        instance = await self._launcher.instance(attempt)
        if instance is None or instance.url is None:
            return None
        name, before = model.wish.name, self._heard.get(model.wish.name)

        def busy() -> bool:
            self._quiet_s(name)
            return self._heard.get(name) != before

        return await measure(
            attempt.evolve(plan=for_copies(attempt.plan, 1)), instance, busy, _MEASURED_S
        )

    def _may(self, name: str, what: str) -> bool:
        """Whether this was not done lately. What a request interrupts may be done again when it is
        quiet again."""
        self._done = {one: at for one, at in self._done.items() if time.monotonic() - at < _AGAIN_S}
        now = time.monotonic()
        return self._done.setdefault((name, what), now) == now

    def _quiet_s(self, name: str) -> float:
        """Seconds since a request was seen; those that run count as seen now."""
        ended, now = self._asked().get(name, 0.0), time.monotonic()
        before, at = self._heard.get(name, (-1.0, now))
        if ended != before or self._working(name):
            before, at = ended, now
            self._done = {one: done for one, done in self._done.items() if one[0] != name}
        self._heard[name] = before, at
        return now - at


def _alone(model: ManagedModel, replica: ReplicaState) -> ReplicaState | None:
    """The replica, where there are others: what serves is then compared by what one of them
    gives."""
    return replica if len(model.replicas) > 1 else None


def _is_measured(plan: Plan) -> bool:
    return plan.speed is not None and plan.speed.grade == "measured"


def _unusable(serving: list[Attempt], report: BenchReport) -> str:
    """Why nothing can be learned from the measurement; "" where something can."""
    if report.disturbed:
        return report.disturbed
    if not serving:
        return "it is an endpoint, whose plan is not known"
    planned = serving[0].plan.replicas.value
    if len(serving) != planned:
        return f"{len(serving)} of {planned} replicas serve"
    return ""
