"""Measures the load of copies before each pass, and applies the decisions about their number.

The decision itself is in gateway/controller/decisions/copies.py.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gateway.controller.decisions.copies import (
    CopyCause,
    CopyChange,
    CopyDecision,
    CopyLoad,
    CopyRules,
    CopySize,
    Room,
    ScaledModel,
    decide_copies,
    has_spare_copy,
)
from gateway.controller.fleet.evictable_copy import build_copy
from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.fleet.model_state import capacity
from gateway.domain import Hardware, Plan
from gateway.domain.plan import RAM
from gateway.engines.common.planning_input import available_ram, free_bytes_of
from gateway.logging import Logger
from gateway.planner.sharing.promised_bytes import sum_promises
from gateway.proxy.routing.routes import Routes
from gateway.settings import Settings

if TYPE_CHECKING:
    from gateway.controller.evictor import Evictor

log = Logger("fitserve.loop")

# States of a replica that is not started before something changes.
_FAILED_STATES = ("no_plan", "quarantined")


@dataclass
class _CopyTimes:
    """The times of one model's copies, in monotonic seconds. See `ScaledModel`."""

    calm_since: float | None = None
    changed_at: float | None = None
    barred_until: float = 0.0


class CopySizer:
    """Lets the number of copies follow the load, for models whose wish has `copies`.

    `changes` counts the changes by model and cause.
    """

    def __init__(
        self,
        fleet: Fleet,
        routes: Routes,
        settings: Settings,
        evictor: Evictor,
        hardware: Callable[[], Awaitable[Hardware]],
    ) -> None:
        self.changes: Counter[tuple[str, CopyCause]] = Counter()
        self._fleet = fleet
        self._routes = routes
        self._settings = settings
        self._evictor = evictor
        self._hardware = hardware
        self._rules = CopyRules(
            settings.copies_wait_s, settings.copies_idle_s, settings.copies_pause_s
        )
        self._times: dict[str, _CopyTimes] = {}

    async def follow_load(self, demand: Mapping[str, float]) -> None:
        """Decide for all models with `copies`, and apply it. `demand` is `Routes.demand`."""
        models = [model for model in self._fleet.models.values() if _follows_load(model)]
        if not models and not self._times:
            return
        names = {model.wish.name for model in models}
        self._times = {name: times for name, times in self._times.items() if name in names}
        now = time.monotonic()
        scaled_models = [self._scaled_model(model, demand, now) for model in models]
        room = await self._room(scaled_models, demand)
        self._apply(decide_copies(scaled_models, room, now, self._rules), now, models)

    def _apply(self, decision: CopyDecision, now: float, models: list[ManagedModel]) -> None:
        """Record the changes, and have copies leave that are one too many."""
        for model in models:
            name = model.wish.name
            model.copy_hold_reason = decision.hold_reasons.get(name, "")
            change = decision.changes.get(name)
            if change is not None:
                self._record(model, replace(change, at=time.time()), now)
            for surplus_replica in model.replicas:
                if (
                    model.is_surplus(surplus_replica)
                    and surplus_replica.attempt is not None
                    and surplus_replica.eviction is None
                ):
                    self._evictor.retire_copy((name, surplus_replica.index), _leave_reason(model))

    def _record(self, model: ManagedModel, change: CopyChange, now: float) -> None:
        name = model.wish.name
        times = self._times[name]
        times.changed_at = now
        if change.cause == "failure":
            times.barred_until = now + self._rules.idle_s
        model.copy_change = change
        self.changes[name, change.cause] += 1
        log.info(
            "copies",
            model=name,
            copies=change.count,
            former=change.former_count,
            cause=change.cause,
            why=change.reason,
        )

    def _scaled_model(
        self, model: ManagedModel, demand: Mapping[str, float], now: float
    ) -> ScaledModel:
        """The model as the decision sees it; notes since when its load is small."""
        name = model.wish.name
        times = self._times.setdefault(name, _CopyTimes())
        wanted_replicas = [replica for replica in model.replicas if not model.is_surplus(replica)]
        surplus_replicas = model.replicas[len(wanted_replicas) :]
        copies = tuple(self._copy_load(model, replica) for replica in wanted_replicas)
        is_calm = name not in demand and has_spare_copy(copies)
        times.calm_since = (times.calm_since or now) if is_calm else None
        return ScaledModel(
            name,
            model.wish.least_copies or 1,
            model.wish.most_copies or 1,
            copies,
            _copy_size(model),
            leaving_bytes=sum_promises(
                pair
                for replica in surplus_replicas
                for pair in self._held_bytes(model, replica).items()
            ),
            is_leaving=bool(surplus_replicas),
            waited_s=demand.get(name),
            queue_length=self._routes.waiting(name),
            calm_since=times.calm_since,
            changed_at=times.changed_at,
            barred_until=times.barred_until,
            priority=model.wish.policy.priority,
            is_pinned=model.wish.policy.pinned,
        )

    def _copy_load(self, model: ManagedModel, replica: ReplicaState) -> CopyLoad:
        attempt = replica.attempt
        copy = build_copy(model, replica)
        if replica.eviction is not None:
            return CopyLoad("leaves", held_bytes=self._held_bytes(model, replica), capacity=0)
        if attempt is None or copy.state == "asleep":
            return _absent_copy(replica)
        held_bytes = self._held_bytes(model, replica)
        if copy.state != "serves":
            return CopyLoad("comes", held_bytes=held_bytes, capacity=0)
        is_resident = time.time() - copy.entered_at < copy.residence_s
        return CopyLoad(
            "serves",
            self._routes.in_flight(attempt.instance_name),
            capacity(attempt.plan),
            held_bytes,
            is_settled=not is_resident and not self._evictor.is_watched(replica),
        )

    def _held_bytes(self, model: ManagedModel, replica: ReplicaState) -> Mapping[str, int]:
        return self._fleet.held_bytes(model, replica)

    async def _room(self, models: list[ScaledModel], demand: Mapping[str, float]) -> Room:
        """The room for further copies, read only where a queue has waited for long enough."""
        waits = any((model.waited_s or 0.0) >= self._rules.wait_s for model in models)
        # The GPUs of other machines are known to the planner only.
        if not waits or self._settings.host_kind == "cluster":
            return Room()
        waiting_models = (
            model
            for name in demand
            if (model := self._fleet.models.get(name)) is not None
            and model.replicas
            and not model.serving
        )
        machine = (await self._hardware()).usable()
        promised_bytes = self._fleet.bytes_promised_to_others(None)
        free_bytes = {gpu.uuid: free_bytes_of(gpu, promised_bytes) for gpu in machine.gpus}
        free_bytes[RAM] = available_ram(machine, promised_bytes)
        waiting_model = next(waiting_models, None)
        return Room(free_bytes, waiting_model.wish.name if waiting_model is not None else "")


def _follows_load(model: ManagedModel) -> bool:
    """Whether the number of its copies is decided now."""
    return (
        model.wish.copies is not None
        and not model.is_deleting
        and not model.has_pending_changes
        and model.trial is None
        and not model.pause_reason
    )


def _absent_copy(replica: ReplicaState) -> CopyLoad:
    """A copy without an engine: it comes, or it is out with the reason."""
    status = replica.status
    if replica.is_busy:
        return CopyLoad("comes", capacity=0)
    if status.state in _FAILED_STATES:
        return CopyLoad("out", reason=_failure_words(status.reason), capacity=0, has_failed=True)
    ended_attempt = replica.history[-1] if replica.history else None
    if replica.is_asleep or (ended_attempt is not None and ended_attempt.failure is None):
        reason = "another model took its memory, or the model was unloaded"
        return CopyLoad("out", reason=reason, capacity=0)
    return CopyLoad("comes", capacity=0)


def _failure_words(reason: str) -> str:
    return f"one more copy could not be started: {reason}" if reason else "it could not be started"


def _leave_reason(model: ManagedModel) -> str:
    """Why a copy is one too many: by the last change, or by a new wish."""
    change = model.copy_change
    if change is not None and change.count < len(model.replicas):
        return change.reason
    return f"the wish is for {model.wish.copies} copies"


def _copy_size(model: ManagedModel) -> CopySize:
    """The least memory of one more copy, by the plan of a copy."""
    plan = next((attempt.plan for attempt in model.serving), None)
    if plan is None:
        return CopySize()
    allowed_gpus = model.wish.gpus
    return CopySize(
        _copy_bytes(plan),
        len(plan.gpus),
        frozenset(allowed_gpus) if isinstance(allowed_gpus, tuple) else None,
    )


def _copy_bytes(plan: Plan) -> int:
    """Bytes of each device that the plan needs with the KV cache of one request."""
    memory = plan.memory
    request_bytes = memory.kv_bytes_per_token * plan.max_model_len.value
    return memory.promised_bytes - memory.kv_bytes + min(memory.kv_bytes, request_bytes)
