"""Searches for better plans of idle models, where FITSERVE_AUTO_TUNE allows them.

    model idle, not tuned   begin the search that `fitserve tune` begins
    request while it runs   end it; the next idle time continues with the measurements
    search has ended        take the best plan, if any; then wait until another plan serves

Engines are tried alongside the model where memory allows. Otherwise the model stops meanwhile, but
only for a plan that should be better by its forecast.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import ManagedModel
from gateway.errors import Conflict, FitserveError
from gateway.logging import Logger
from gateway.measuring.tuning.engine_traffic import ServedTraffic
from gateway.measuring.tuning.tuning_report import SearchOptions
from gateway.supervision import SupervisedTask

if TYPE_CHECKING:
    from gateway.measuring.tuning.tunings import Tunings

log = Logger("fitserve.tuning")

# Seconds between two checks of all models.
_LOOK_S = 2.0
# Longest time of a search, as of `fitserve tune` by default.
_SEARCH_S = 900.0
# Seconds until a search that could not begin or failed is tried again.
_RETRY_S = 3600.0


class _Search(NamedTuple):
    """The running search.

    start_s: monotonic seconds.
    plans: the serving plan of that time, and its rival.
    """

    name: str
    start_s: float
    plans: frozenset[str]


class AutomaticTuning:
    """Begins, ends and applies searches, one at a time. idle_s: a model without a request for so
    long is idle."""

    def __init__(
        self, fleet: Fleet, tunings: Tunings, traffic: ServedTraffic, idle_s: float
    ) -> None:
        self._fleet = fleet
        self._tunings = tunings
        self._traffic = traffic
        self._idle_s = idle_s
        self._last_requests: dict[str, tuple[float, float]] = {}
        """Ended requests at the last request, and its monotonic time, by model."""
        self._tuned: dict[str, set[str]] = {}
        """Served and better plans that a search has ended for, by model."""
        self._retry_at: dict[str, float] = {}
        self._search: _Search | None = None
        self._watching = SupervisedTask(self._tune_idle_models, "tuning idle models")

    async def close(self) -> None:
        await self._watching.close()

    async def _tune_idle_models(self) -> float:
        models = self._fleet.models
        for times in (self._last_requests, self._tuned, self._retry_at):
            for name in times.keys() - models.keys():
                del times[name]
        idle = {name: self._seconds_idle(model) for name, model in models.items()}
        if self._search is not None:
            await self._attend(self._search, idle)
        for name, seconds in idle.items():
            if seconds >= self._idle_s and not self._tunings.is_busy and self._is_due(name):
                await self._start(name)
        return _LOOK_S

    async def _attend(self, search: _Search, idle: dict[str, float]) -> None:
        """End the search for a request, or take its result."""
        name = search.name
        model = self._fleet.models.get(search.name)
        if model is None:
            self._search = None
            return
        report = self._tunings.report(name)
        if not report.is_automatic:
            self._search = None
            return
        if report.state == "running":
            if idle[name] < time.monotonic() - search.start_s:
                self._search = None
                await self._tunings.stop(name, "a request came")
            return
        self._search = None
        if report.state != "done":
            self._retry_at[name] = time.monotonic() + _RETRY_S
            return
        self._tuned.setdefault(name, set()).update(search.plans | _plans(model))
        if report.wish is not None:
            try:
                await self._tunings.apply(name)
            except FitserveError as error:
                log.info("a better plan was not taken", model=name, reason=str(error))

    def _is_due(self, name: str) -> bool:
        model = self._fleet.models.get(name)
        return (
            model is not None
            and bool(model.serving)
            and len(model.serving) == len(model.replicas)
            and not (
                model.is_deleting or model.has_pending_changes or model.is_stopped or model.trial
            )
            and not any(replica.is_busy for replica in model.replicas)
            and time.monotonic() >= self._retry_at.get(name, 0.0)
            and not _plans(model) <= self._tuned.get(name, set())
        )

    async def _start(self, name: str) -> None:
        options = SearchOptions(_SEARCH_S, is_automatic=True)
        plans = _plans(self._fleet.model(name))
        try:
            try:
                await self._tunings.start(name, options)
            except Conflict as refusal:
                if refusal.param != "offline":
                    raise
                options = SearchOptions(_SEARCH_S, is_automatic=True, may_be_away=True)
                await self._tunings.start(name, options)
        except FitserveError as error:
            self._retry_at[name] = time.monotonic() + _RETRY_S
            log.info("an idle model was not tuned", model=name, reason=str(error))
            return
        log.info("an idle model is tuned", model=name, offline=options.may_be_away)
        self._search = _Search(name, time.monotonic(), plans)

    def _seconds_idle(self, model: ManagedModel) -> float:
        """Seconds since the last request; running and waiting requests count as now."""
        name = model.wish.name
        now_s = time.monotonic()
        ended_count = self._traffic.request_counts().get(name, 0.0)
        last_count, last_s = self._last_requests.get(name, (-1.0, now_s))
        if ended_count != last_count or model.has_requests or self._traffic.is_working(name):
            last_count = ended_count
            last_s = now_s
        self._last_requests[name] = last_count, last_s
        return now_s - last_s


def _plans(model: ManagedModel) -> frozenset[str]:
    """The fingerprints of the served plan and of the plan that should be better."""
    rivals = {model.rival.plan.fingerprint} if model.rival is not None else set()
    served_fingerprints = {attempt.fingerprint for attempt in model.serving}
    return frozenset(served_fingerprints | rivals)
