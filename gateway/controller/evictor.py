"""Measures demand and idle time before each pass, and applies evictions and holds.

The decision itself is in gateway/controller/decisions/eviction.py.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from gateway.controller.decisions.eviction import (
    MIN_S,
    Copy,
    CopyId,
    Eviction,
    EvictionCause,
    EvictionDecision,
    LoadedModel,
    decide_evictions,
    eviction_order,
    is_loadable,
    load_order,
)
from gateway.controller.fleet.evictable_copy import build_copy
from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.steady_times import MonotonicTimes
from gateway.domain import Instance
from gateway.errors import StoreError
from gateway.logging import Logger
from gateway.proxy.routing.routes import Routes
from gateway.settings import Settings
from gateway.store.store import Store

log = Logger("fitserve.loop")

# Seconds between two counts of ended requests while no request waits, and between two writes of the
# last use.
_COUNT_S = 1.0
_NOTE_S = 60.0


class Evictor:
    """Applies evictions to the fleet.

    `unloads` counts evicted copies by model and reason. `measures` is `StartGate.measures`.
    `ended_counts` gives the number of ended requests of each model.
    """

    def __init__(
        self,
        fleet: Fleet,
        routes: Routes,
        store: Store,
        settings: Settings,
        measures: Callable[[Collection[str]], bool],
        ended_counts: Callable[[], Mapping[str, float]],
    ) -> None:
        self.unloads: Counter[tuple[str, EvictionCause]] = Counter()
        self._fleet = fleet
        self._routes = routes
        self._store = store
        self._settings = settings
        self._measures = measures
        self._ended_counts = ended_counts
        self._counts: Mapping[str, float] | None = None
        self._counted_at = self._noted_at = 0.0
        self._noted_use: dict[str, float] = {}
        self._times = MonotonicTimes()
        self.is_freeing_memory = False
        """Whether room for a model is being made, or awaited."""
        self._order: dict[str, tuple[bool, int, float]] = {}

    async def decide_evictions(
        self,
        instances: Iterable[Instance],
        awake_models: Iterable[ManagedModel],
        demand: Mapping[str, float],
    ) -> None:
        """Decide for the models that do not rest. `demand` is `Routes.demand`. Raises
        StoreError."""
        now, wall = self._times.start_pass(self._fleet.models.keys())
        models_by_instance = {instance.name: instance.model for instance in instances}
        models = [model for model in awake_models if model.replicas]
        self._record_use(models, wall, has_requests=bool(demand))
        for model in models:
            self._clear_eviction(model, models_by_instance)
            # Requests that wait while a copy serves are among those that it still answers.
            is_requested = model.wish.name in demand and not model.serving
            model.is_unloaded &= not (is_requested or model.wish.policy.pinned)
        loaded_models = self._loaded_models(models, demand, models_by_instance)
        self._update_fleet(loaded_models, now)
        for model in models:
            self._record_requests(model, has_requests=model.wish.name in demand)
        self._record_idle_models(loaded_models, wall)
        # The notes change the states of their models.
        loaded_models = self._loaded_models(models, demand, models_by_instance)
        self._apply_moves(loaded_models, decide_evictions(loaded_models, now))
        self._order = {
            loaded_model.name: load_order(loaded_model) for loaded_model in loaded_models
        }
        await self._write_use()

    def _update_fleet(self, loaded_models: Sequence[LoadedModel], now: float) -> None:
        """Tell plans which models can be evicted, and in which order."""
        self._fleet.eviction_order = eviction_order(loaded_models, now)
        self._fleet.unasked_models = {
            loaded_model.name for loaded_model in loaded_models if not loaded_model.is_requested
        }

    def _record_idle_models(self, loaded_models: Sequence[LoadedModel], wall: float) -> None:
        """Note which models have had no request since they were loaded last."""
        for loaded_model in loaded_models:
            model = self._fleet.models[loaded_model.name]
            model.is_unused = (
                (model.is_unused or loaded_model.state in ("out", "asleep"))
                and not loaded_model.is_requested
                and model.used_at != wall
            )

    def _apply_moves(self, loaded_models: Sequence[LoadedModel], moves: EvictionDecision) -> None:
        """Evict, hold, and load on request, as was decided."""
        transitions = {
            loaded_model.name for loaded_model in loaded_models if loaded_model.is_in_transition
        }
        self.is_freeing_memory = bool(transitions or moves.evictions or moves.next_to_load)
        for copy_id, eviction in moves.evictions.items():
            self._evict(copy_id, eviction)
        for loaded_model in loaded_models:
            model = self._fleet.models[loaded_model.name]
            model.load_block_reason = moves.hold_reasons.get(loaded_model.name, "")
            model.is_first_in_line = moves.next_to_load == loaded_model.name
            waits_for_request = (
                model.waits_for_request
                or loaded_model.keep_alive_s >= 0
                or loaded_model.was_evicted
                or not loaded_model.has_plan
                or loaded_model.name in moves.hold_reasons
                or any(replica.eviction for replica in model.replicas)
            )
            model.waits_for_request = waits_for_request and is_loadable(loaded_model, transitions)

    def retire_copy(self, copy_id: CopyId, reason: str) -> None:
        """Have a copy leave that its model's load no longer needs. Its engine stops after its last
        answer."""
        self._evict(copy_id, Eviction("load", reason, stops_engine=True))

    def plan_order(self, awake_models: Iterable[ManagedModel]) -> list[ManagedModel]:
        """The models of the last look in the order in which they are planned."""
        last = (True, 101, 0.0)
        return sorted(awake_models, key=lambda model: self._order.get(model.wish.name, last))

    def _evict(self, copy_id: CopyId, eviction: Eviction) -> None:
        """Evict a copy: it gets no more requests, nor does a trial in its place."""
        name, index = copy_id
        replicas = [
            evicted_replica
            for evicted_replica in self._fleet.models[name].all_replicas
            if evicted_replica.index == index and evicted_replica.eviction is None
        ]
        if replicas:
            # A sleeping copy was counted before.
            self.unloads[name, eviction.cause] += not all(
                evicted_replica.is_asleep for evicted_replica in replicas
            )
            log.info("leaves", model=name, replica=index, why=eviction.reason)
        for replica in replicas:
            replica.eviction = eviction

    def _clear_eviction(self, model: ManagedModel, models_by_instance: Mapping[str, str]) -> None:
        """Clear an eviction once the engine is gone, or asleep where that suffices."""
        for replica in model.all_replicas:
            if replica.eviction is None or replica.is_busy:
                continue
            must_stay = replica.is_asleep and not (
                replica.eviction.stops_engine or model.is_deleting
            )
            is_running = replica.attempt is not None or any(
                attempt.instance_name in models_by_instance for attempt in replica.attempts
            )
            if must_stay or not is_running:
                replica.eviction = None
                replica.planning.looks_again = True
                model.was_evicted = True
                self._fleet.schedule_replanning()

    def _record_requests(self, model: ManagedModel, *, has_requests: bool) -> None:
        """Note whether requests wait, and plan again where that changes something.

        Evictions are planned only for a model with requests. Evictions are planned again if they do
        not happen in time.
        """
        stops = model.copies_to_evict
        copies = (
            copy_of_giver
            for name, index in stops
            if (giver := self._fleet.models.get(name))
            for copy_of_giver in giver.replicas[index:][:1]
        )
        is_idle = not any(copy.eviction for copy in copies)
        is_overdue = any(
            time.monotonic() - waiting_replica.planning.blocked_at > MIN_S
            for waiting_replica in model.replicas
            if waiting_replica.planning.awaited_offers
        )
        may_evict = has_requests or model.wish.policy.pinned
        # A copy may be evicted now that could not when the model was planned.
        has_evictable_copy = (
            may_evict
            and not stops
            and any(
                copy_id not in model.evictable_copies_at_last_plan
                for copy_id in self._fleet.evictable_copies(model)
            )
        )
        # Requests for serving copies come and go: they change nothing unless a copy is evicted for
        # them.
        is_first = has_requests and not (model.has_requests or model.serving)
        if is_first or has_evictable_copy or (stops and is_idle and (is_overdue or not may_evict)):
            for replica in model.replicas:
                replica.planning.blocked_reason = None
                replica.planning.awaited_offers = ()
                replica.planning.is_outdated = True
        model.has_requests = has_requests

    def _loaded_models(
        self,
        models: Iterable[ManagedModel],
        demand: Mapping[str, float],
        models_by_instance: Mapping[str, str],
    ) -> list[LoadedModel]:
        return [
            loaded_model
            for model in models
            if (loaded_model := self._loaded_model(model, demand, models_by_instance)) is not None
        ]

    def _loaded_model(
        self,
        model: ManagedModel,
        demand: Mapping[str, float],
        models_by_instance: Mapping[str, str],
    ) -> LoadedModel | None:
        """The model as eviction sees it; `models_by_instance` maps instance names to models."""
        name = model.wish.name
        live_attempts = [
            replica.attempt for replica in model.replicas if replica.attempt is not None
        ]
        if model.is_deleting:
            is_running = (
                live_attempts or self._is_busy(model) or name in models_by_instance.values()
            )
            return LoadedModel(name, (Copy(0, "leaves"),)) if is_running else None
        copies = tuple(
            replace(
                copy,
                entered_at=self._times.convert_time(name, copy.entered_at),
                is_watched=self.is_watched(replica),
            )
            for replica in model.replicas
            for copy in (build_copy(model, replica),)
        )
        loaded_model = LoadedModel(name, copies)
        if loaded_model.state == "serves":
            model.was_evicted = False
        # Room is a question for the copies that are away.
        absent_replicas = [
            replica for replica in model.replicas if replica.attempt is None or replica.is_asleep
        ] or model.replicas
        unable = [
            replica.status.state in ("quarantined", "backing_off")
            for replica in (absent_replicas if loaded_model.lacks_copies else model.replicas)
        ]
        policy = model.wish.policy
        return replace(
            loaded_model,
            is_stopped=model.is_stopped,
            is_unloaded=model.is_unloaded,
            keep_alive_s=self._fleet.keep_alive_s(model.wish),
            is_pinned=policy.pinned,
            priority=policy.priority,
            used_at=self._times.convert_time(name, model.used_at or model.created_at),
            requests=sum(
                self._routes.in_flight(attempt.instance_name) for attempt in live_attempts
            ),
            waited_s=demand.get(name),
            has_plan=any(replica.planning.blocked_reason is None for replica in absent_replicas),
            must_evict=model.copies_to_evict,
            must_stop=model.copies_to_stop,
            is_promised_memory=any(replica.planning.awaited_offers for replica in model.replicas),
            waits_for_request=any(replica.planning.waits_for_request for replica in model.replicas),
            can_start=not all(unable),
            was_evicted=model.was_evicted,
            was_never_loaded=not any(replica.history for replica in model.replicas),
            is_without_requests=model.is_unused,
        )

    def is_watched(self, replica: ReplicaState) -> bool:
        return replica.attempt is not None and self._measures(replica.attempt.plan.gpus)

    @staticmethod
    def _is_busy(model: ManagedModel) -> bool:
        return any(replica.is_busy for replica in model.replicas)

    def _record_use(
        self, models: Iterable[ManagedModel], now: float, *, has_requests: bool
    ) -> None:
        """Note the time of use: a request is in flight, or has ended since the last look."""
        for model in models:
            if any(
                self._routes.in_flight(replica.attempt.instance_name)
                for replica in model.replicas
                if replica.attempt is not None
            ):
                model.used_at = now
        if time.monotonic() - self._counted_at < _COUNT_S and not has_requests:
            return
        former_counts = self._counts
        self._counts = self._ended_counts()
        self._counted_at = time.monotonic()
        if former_counts is None:
            return
        for name, count in self._counts.items():
            used_model = self._fleet.models.get(name)
            if (
                used_model is not None
                and used_model.replicas
                and count > former_counts.get(name, 0.0)
            ):
                used_model.used_at = now

    async def _write_use(self) -> None:
        """Write the last use of models to disk, once in a while."""
        if time.monotonic() - self._noted_at < _NOTE_S or self._store.problem is not None:
            return
        self._noted_at = time.monotonic()
        used_at = {
            model.wish.name: model.used_at
            for model in self._fleet.models.values()
            if model.used_at != self._noted_use.get(model.wish.name, 0.0)
        }
        if used_at:
            self._noted_use |= used_at
            try:
                await asyncio.to_thread(self._store.record_use, used_at)
            except StoreError as error:
                log.warning("the last use of models could not be recorded", error=str(error))
