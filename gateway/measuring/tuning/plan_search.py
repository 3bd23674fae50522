"""The search for the fastest plan of one served model, by trials on its own machine.

    served plan        measured where it serves
    engine's defaults  started and measured, to compare with
    plan changes       planned, started and measured: changes of the best plan so far

The best plan is proposed. Nothing of the model changes. The gateway begins the same search for an
idle model by itself where it is allowed to: `automatic_tuning`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gateway.controller.decisions.changes import is_as_good
from gateway.controller.fleet.managed_model import ManagedModel
from gateway.controller.plan_preview import PlanPreview
from gateway.controller.steps.launcher import Launcher
from gateway.controller.steps.trial_steps import TrialSteps
from gateway.domain import Attempt, BenchReport, Decision, Engine, EngineRef, Plan, Speed
from gateway.engines.common.speed.expectation import scale_speed
from gateway.engines.common.speed.rival import MEASURED_GAIN
from gateway.errors import Conflict, FitserveError
from gateway.logging import Logger
from gateway.measuring.tuning.engine_load import measure
from gateway.measuring.tuning.engine_traffic import ServedTraffic
from gateway.measuring.tuning.plan_changes import (
    BasePlan,
    PlanChange,
    concurrent_requests,
    engine_defaults,
    forecast_best,
    keeps_quality,
    may_win,
    neighbours,
    other_engines,
    pin_layout,
    speculation,
)
from gateway.measuring.tuning.plan_figures import measured_speed, rebase, score_plan
from gateway.measuring.tuning.tuning_report import SearchOptions, TriedPlan, TuningReport

if TYPE_CHECKING:
    from gateway.measuring.tuning.measurements import Measurements

log = Logger("fitserve.tuning")

_POLL_S = 0.1
# Seconds for each number of concurrent requests.
_MEASUREMENT_S = 5.0
# A plan with this gain is better, and the next changes are made from it.
_GAIN = 1.03
# This many changes in a row without a gain end the search.
_PATIENCE = 6
# Measurements of one plan that requests of clients may interrupt.
_TRIES = 3


@dataclass(frozen=True)
class SearchTools:
    """The parts of a gateway that a search uses."""

    plan_preview: PlanPreview
    trials: TrialSteps
    launcher: Launcher
    traffic: ServedTraffic
    engine: Callable[[EngineRef], Engine]
    measurements: Measurements


class _SearchInterruption(Exception):
    """The model changed, or its owner stopped the search; the message is for people."""


class _NoFigures(Exception):
    """A plan could not be measured; the message is for people."""


class PlanSearch:
    """One search. `report` is its present state. wish: of the model that is tuned."""

    def __init__(self, model: ManagedModel, tools: SearchTools, options: SearchOptions) -> None:
        self._model = model
        self._tools = tools
        self._options = options
        self.wish = model.wish
        self._start_s = time.monotonic()
        self._served_worth = 0.0
        self._uses_sentences = False
        """Prompts are sentences, as random tokens say nothing about drafted ones."""
        self._shapes_tried: set[str] = set()
        """The starts of all plans that were tried."""
        self._trial_s = 0.0
        """The longest time of a start with its measurement."""
        self._report = TuningReport(
            model=model.wish.name,
            state="running",
            phase="the served plan: measuring",
            seconds=options.seconds,
            is_automatic=options.is_automatic,
        )

    @property
    def report(self) -> TuningReport:
        is_running = self._report.state == "running"
        elapsed_s = (
            round(time.monotonic() - self._start_s, 1) if is_running else self._report.elapsed_s
        )
        return self._report.evolve(elapsed_s=elapsed_s)

    def record_application(self) -> None:
        self._report = self._report.evolve(is_applied=True)

    async def check(self) -> None:
        """Check that the model can be tuned as it is. Raises Conflict."""
        model = self._model
        name = self.wish.name
        serving_attempts = model.serving
        is_settled = not (
            model.has_pending_changes or model.is_deleting or model.is_stopped or model.trial
        )
        if not serving_attempts or len(serving_attempts) < len(model.replicas) or not is_settled:
            raise Conflict(
                f"{name} does not serve with all its copies, so its plans cannot be compared.",
                hint=f"`fitserve show {name}` shows its state. Try again when it is ready.",
            )
        if serving_attempts[0].plan.model.task != "generate":
            raise Conflict(
                f"{name} generates no text, so its speed cannot be measured.",
                hint="Tune a model that generates text.",
            )
        if not self._options.may_be_away and not await self._fits_beside(serving_attempts[0].plan):
            raise Conflict(
                f"The memory is too small for a second engine of {name} next to the one that "
                "serves.",
                hint=f"`fitserve tune {name} --offline` stops it meanwhile, and brings it back.",
                param="offline",
            )

    async def run(self) -> None:
        """Search until the time is over, nothing is left, or the gains end. Never raises."""
        state = "done"
        phase = ""
        try:
            phase = await self._search()
        except (_SearchInterruption, asyncio.CancelledError) as error:
            state = "stopped"
            phase = str(error) or "the gateway stopped"
        except FitserveError as error:
            state = "failed"
            phase = str(error)
        except Exception as error:
            log.exception("a search for a better plan failed", model=self.wish.name)
            state = "failed"
            phase = f"unexpected error: {type(error).__name__}"
        self._tools.trials.restart_predecessors(self._model)
        report = self.report.evolve(state=state, phase=phase)
        log.info("tuned", model=self.wish.name, state=state, tried=len(report.tried), words=phase)
        self._report = report

    # --- the search ---

    async def _search(self) -> str:
        """The reason of its end."""
        attempt = self._model.serving[0]
        served_plan = attempt.plan
        engine = await asyncio.to_thread(self._tools.engine, served_plan.engine)
        wish = pin_layout(self.wish, served_plan)
        best_plan = BasePlan(
            self.wish, wish, served_plan, engine, allows_lossy=self._options.allows_lossy
        )
        self._uses_sentences = served_plan.speculation.value != "none" or await self._can_speculate(
            best_plan
        )
        self._trial_s = (attempt.ready_at or attempt.started_at) - attempt.started_at
        start_s = time.monotonic()
        await self._measure_trial("the served plan", "", served_plan, attempt)
        self._trial_s += time.monotonic() - start_s
        if self._report.tried[0].speed is None:
            return f"the served plan could not be measured: {self._report.tried[0].problem}"
        best_plan = self._add_last_speed(best_plan)
        if self._options.may_be_away:
            if self._options.is_automatic and self._model.rival is None:
                return "no plan should be better, and no plan fits next to the served one"
            self._set_phase("its engines stop after their last answers")
            await self._tools.trials.leave(self._model)
            self._report = self._report.evolve(is_offline=True)
        self._shapes_tried.add(_fingerprint_without_gpus(served_plan))
        await self._compare_defaults(best_plan)
        reason = await self._climb(best_plan)
        if self._report.wish is not None and self._has_time():
            await self._confirm_gain(served_plan, attempt)
        return reason

    async def _compare_defaults(self, served_plan: BasePlan) -> None:
        """Measure the engine's own defaults, where they are another plan."""
        for plan_change in engine_defaults(served_plan):
            plan = await self._plan_of_change(plan_change)
            if plan is not None:
                self._shapes_tried.add(_fingerprint_without_gpus(plan))
                is_other = _fingerprint_without_gpus(plan) != _fingerprint_without_gpus(
                    served_plan.plan
                )
                if is_other and self._has_time():
                    await self._measure_trial(plan_change.change, plan_change.reason, plan)
                return

    async def _climb(self, best_plan: BasePlan) -> str:
        """Try changes of the best plan so far. The reason of the end."""
        first = best_plan
        without_gain = 0
        other_engine_plans = other_engines(self.wish, await self._alternatives(), first.plan)
        forecast = forecast_best(self.wish, self._model.rival)
        plan_changes = iter((*forecast, *neighbours(best_plan), *other_engine_plans))
        while (plan_change := next(plan_changes, None)) is not None:
            plan = await self._plan_of_change(plan_change)
            if plan is None or _fingerprint_without_gpus(plan) in self._shapes_tried:
                continue
            if not (keeps_quality(plan, first) and may_win(plan, best_plan)):
                continue
            if not self._has_time():
                return "the time is over"
            self._shapes_tried.add(_fingerprint_without_gpus(plan))
            worth = await self._measure_trial(plan_change.change, plan_change.reason, plan)
            if worth is not None and worth > _GAIN * self._best_worth():
                self._record_best(plan_change)
                engine = await asyncio.to_thread(self._tools.engine, plan.engine)
                best_plan = BasePlan(
                    self.wish, plan_change.wish, plan, engine, allows_lossy=best_plan.allows_lossy
                )
                best_plan = self._add_last_speed(best_plan)
                plan_changes = iter((*neighbours(best_plan), *other_engine_plans))
                without_gain = 0
                continue
            without_gain += 1
            if without_gain >= _PATIENCE:
                return f"the last {_PATIENCE} changes gave nothing"
        return "no change is left to try"

    async def _confirm_gain(self, served_plan: Plan, attempt: Attempt) -> None:
        """Measure the served plan a second time, as the machine may have been busy before.

        The better figure counts. A plan that is no better than it is not proposed.
        """
        change = "the served plan, a second time"
        try:
            if self._report.is_offline:
                report = await self._start_and_measure(served_plan, change)
            else:
                report = await self._measure_attempt(attempt, change)
        except _NoFigures as error:
            log.info("the gain could not be confirmed", model=self.wish.name, reason=str(error))
            return
        if not self._uses_sentences:
            await self._tools.measurements.store_measurement(self._model, served_plan, report)
        speed = measured_speed(served_plan, report)
        ratio = score_plan(served_plan, speed, self.wish) / self._served_worth
        if ratio > 1:
            self._report = rebase(self._report, speed, ratio)

    def _add_last_speed(self, base: BasePlan) -> BasePlan:
        """The plan with its measured speed, where forecasts of others learn from the same one."""
        speed = self._report.tried[-1].speed
        if self._uses_sentences or speed is None:
            return base
        return replace(base, plan=base.plan.evolve(speed=speed))

    def _record_best(self, plan_change: PlanChange) -> None:
        """Note that the last tried plan is the best."""
        index = len(self._report.tried) - 1
        is_better = (self._report.tried[index].relative_score or 0) >= MEASURED_GAIN
        self._report = self._report.evolve(best=index, wish=plan_change.wish if is_better else None)

    def _best_worth(self) -> float:
        return self._report.tried[self._report.best].relative_score or 1.0

    async def _can_speculate(self, base: BasePlan) -> bool:
        """Whether a plan that drafts tokens is among the changes."""
        plans = [await self._plan_of_change(change) for change in speculation(base)]
        return any(plan is not None and plan.speculation.value != "none" for plan in plans)

    async def _alternatives(self) -> tuple[Plan, ...]:
        """The plans of all engines that the owner allows and this machine can start, best first."""
        result = await self._tools.plan_preview.plan_trial(
            self._model, self.wish, keeps_model=False
        )
        return (await asyncio.to_thread(Decision.model_validate_json, result.decision)).plans

    async def _plan_of_change(self, plan_change: PlanChange) -> Plan | None:
        """The plan of a change as it would serve; None: none is possible."""
        self._set_phase(f"{plan_change.change}: planning")
        preview = self._tools.plan_preview
        try:
            result = await preview.plan_trial(self._model, plan_change.wish, keeps_model=False)
            placed_result = (
                result
                if self._options.may_be_away
                else await preview.plan_trial(self._model, plan_change.wish, keeps_model=True)
            )
        except FitserveError as error:
            log.info("a plan was refused", change=plan_change.change, reason=str(error))
            return None
        plan = placed_result.plan
        if plan is None or result.plan is None or not is_as_good(plan, result.plan):
            return None
        return plan

    # --- one trial ---

    async def _measure_trial(
        self, change: str, reason: str, plan: Plan, serving_attempt: Attempt | None = None
    ) -> float | None:
        """Measure a plan, by the engine that serves or by one of its own. The relative worth; None:
        it could not be measured."""
        start_s = time.monotonic()
        trial = TriedPlan(change=change, reason=reason)
        trial = trial.evolve(fingerprint=plan.fingerprint, argv=plan.argv)
        try:
            speed = await self._speed(change, plan, serving_attempt)
            worth = score_plan(plan, speed, self.wish)
            self._served_worth = self._served_worth or worth
            trial = trial.evolve(speed=speed, relative_score=round(worth / self._served_worth, 3))
        except _NoFigures as error:
            trial = trial.evolve(problem=str(error))
        self._report = self._report.evolve(tried=(*self._report.tried, trial))
        self._trial_s = max(self._trial_s, time.monotonic() - start_s)
        return trial.relative_score

    async def _speed(self, change: str, plan: Plan, serving_attempt: Attempt | None) -> Speed:
        """The measured speed of a plan. Raises _NoFigures."""
        if self._options.is_automatic and not self._uses_sentences:
            # An earlier search may have ended for a request.
            speed = await self._tools.measurements.tried_speed(plan)
            if speed is not None:
                return speed
        if serving_attempt is not None:
            report = await self._measure_attempt(serving_attempt, change)
        else:
            report = await self._start_and_measure(plan, change)
        # Expectations are about random tokens.
        if not self._uses_sentences:
            await self._tools.measurements.store_measurement(self._model, plan, report)
        return measured_speed(plan, report)

    async def _start_and_measure(self, plan: Plan, change: str) -> BenchReport:
        while self._model.trial is not None:  # the engine of the last one stops
            await self._pause()
        trial = await self._tools.trials.start_measuring(self._model, plan)
        try:
            while (attempt := trial.attempt) is not None and attempt.state != "ready":
                self._set_phase(f"{change}: {trial.phase}")
                await self._pause()
            if attempt is None:
                failure = trial.history[-1].failure if trial.history else None
                raise _NoFigures(failure.message if failure else trial.status.reason)
            return await self._measure_attempt(attempt, change)
        finally:
            await self._tools.trials.stop(self._model)

    async def _measure_attempt(self, attempt: Attempt, change: str) -> BenchReport:
        self._set_phase(f"{change}: measuring")
        instance = await self._tools.launcher.instance(attempt)
        if instance is None or instance.url is None:
            raise _NoFigures("its engine is gone")
        one_copy = attempt.evolve(plan=scale_speed(attempt.plan, 1))
        for _ in range(_TRIES):
            report = await measure(
                one_copy,
                instance,
                self._request_watch(attempt),
                _MEASUREMENT_S,
                concurrent_requests(self.wish, attempt.plan),
                has_text=self._uses_sentences,
            )
            if report is not None:
                return report
            self._set_phase(f"{change}: waiting for the requests of clients")
            while self._tools.traffic.is_working(self.wish.name):
                await self._pause()
        raise _NoFigures("requests of clients, or a failure, ended every measurement")

    def _request_watch(self, attempt: Attempt) -> Callable[[], bool]:
        """A watch for the time of a measurement, which keeps the model loaded.

        The watch returns whether a client's request has disturbed the engine since now, and raises
        as `_raise_if_over`.
        """
        name = self.wish.name
        traffic = self._tools.traffic
        is_shared = any(
            set(attempt.plan.devices) & set(serving_attempt.plan.devices)
            for serving_attempt in self._model.serving
        )
        ended_count = traffic.request_counts().get(name, 0.0)

        def watch() -> bool:
            self._reserve_model()
            self._raise_if_over()
            is_new = traffic.request_counts().get(name, 0.0) != ended_count
            return is_shared and (is_new or traffic.is_working(name))

        return watch

    # --- bounds ---

    def _has_time(self) -> bool:
        """Whether one more trial ends in time, and the model comes back."""
        count = 2 if self._options.may_be_away else 1
        return self._remaining_time_s() > count * self._trial_s

    def _remaining_time_s(self) -> float:
        return self._options.seconds - (time.monotonic() - self._start_s)

    async def _pause(self) -> None:
        """Wait for one look. Raises as `_raise_if_over`."""
        self._reserve_model()
        self._raise_if_over()
        await asyncio.sleep(_POLL_S)

    def _reserve_model(self) -> None:
        """Count as a request, so that the model is not unloaded during the search."""
        self._model.used_at = time.time()

    def _raise_if_over(self) -> None:
        """End the search when its time is over or the model is changed. Raises _NoFigures,
        _SearchInterruption."""
        model = self._model
        if self._remaining_time_s() <= 0:
            raise _NoFigures("the time is over")
        is_out = model.is_deleting or model.is_stopped or model.is_unloaded
        if model.wish != self.wish or model.has_pending_changes or is_out:
            raise _SearchInterruption(
                "the model was changed, stopped, unloaded or removed meanwhile"
            )

    def _set_phase(self, phase: str) -> None:
        self._report = self._report.evolve(phase=phase)

    async def _fits_beside(self, plan: Plan) -> bool:
        result = await self._tools.plan_preview.plan_trial(
            self._model, pin_layout(self.wish, plan), keeps_model=True
        )
        return result.plan is not None and is_as_good(result.plan, plan)


def _fingerprint_without_gpus(plan: Plan) -> str:
    """The identity of a start on any GPUs: a trial next to the served plan takes other GPUs."""
    return plan.evolve(gpus=tuple("" for _ in plan.gpus)).fingerprint
