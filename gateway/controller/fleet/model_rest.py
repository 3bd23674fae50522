"""Models at rest, of which a pass of the control loop need not look at anything.

A model at rest has no engine, no work under way and no waiting request. Nothing about it changes
before one of the values in `fingerprint` does, or the time of its next look comes. A pass that
changes a value, or during which an owner does, begins no rest: its steps saw the former values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from operator import attrgetter
from typing import Any, NamedTuple

from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState

# A model at rest gets a full look at least so often, in seconds.
_MAX_REST_S = 60.0
_FINAL_STATES = frozenset({"stopped", "no_plan", "quarantined"})
MODEL_FIELDS = (
    "wish",
    "is_deleting",
    "is_stopped",
    "is_unloaded",
    "forgiven_at",
    "generation",
    "change",
    "trial",
    "pause_reason",
    "load_block_reason",
    "waits_for_request",
    "has_requests",
    "is_first_in_line",
    "used_at",
    "was_evicted",
    "is_unused",
    "rival",
    "copy_change",
    "created_at",
    "setback.problem",
)
REPLICA_FIELDS = (
    "attempt",
    "task",
    "status",
    "progress",
    "planning.blocked_reason",
    "planning.blocked_at",
    "planning.looks_again",
    "planning.awaited_offers",
    "planning.received_offers",
    "generation",
    "eviction",
    "planning.waits_for_request",
    "succession.unrouted_at",
    "setback.problem",
)
_MODEL_VALUES = attrgetter(*MODEL_FIELDS)
_REPLICA_VALUES = attrgetter(*REPLICA_FIELDS)
_ENDPOINT_VALUES = attrgetter("replica", "state", "detail", "was_contacted")
_REPLICA_WORK = attrgetter(
    "attempt",
    "task",
    "watcher",
    "planning.awaited_offers",
    "eviction",
    "preparation",
    "early_inquiry",
    "succession.unrouted_at",
    "planning.looks_again",
    "setback.problem",
)


def fingerprint(model: ManagedModel) -> tuple[Any, ...]:
    """The values that decide the next step of a model at rest, its route and its view.

    The values are replaced, never changed, so a comparison is cheap.
    """
    values: tuple[Any, ...] = _MODEL_VALUES(model)
    for replica in model.replicas:
        values += (*_REPLICA_VALUES(replica), replica.last_ended_id)
    for endpoint in model.endpoints:
        values += _ENDPOINT_VALUES(endpoint)
    return values


def is_at_rest(model: ManagedModel) -> bool:
    """Whether a pass has nothing to do for the model as long as its fingerprint stays."""
    return not (
        model.is_deleting
        or model.needs_evictions
        or model.trial is not None
        or model.has_pending_changes
        or model.setback.problem is not None
        or len(model.endpoints) != len(model.wish.endpoints)
        or not all(_is_replica_at_rest(replica) for replica in model.replicas)
    )


def _is_replica_at_rest(replica: ReplicaState) -> bool:
    return replica.status.state in _FINAL_STATES and not any(_REPLICA_WORK(replica))


class _Rest(NamedTuple):
    """The rest of one model. `valid_until`: the monotonic time of its next look."""

    values: tuple[Any, ...]
    circumstances: object
    valid_until: float


class RestingModels:
    """Tells which models a pass has to look at."""

    def __init__(self) -> None:
        self._rests: dict[str, _Rest] = {}
        self._looks: dict[str, tuple[Any, ...]] = {}
        """The values of the models of this pass, as its steps see them."""

    def awake(
        self,
        models: Iterable[ManagedModel],
        names: Collection[str],
        circumstances: object,
        now_s: float,
    ) -> list[ManagedModel]:
        """The models that do not rest, or whose rest ends now.

        names: the names of models with requests or engines.
        circumstances: the circumstances of all models together; a change ends every rest.
        """
        awake_models: list[ManagedModel] = []
        self._looks.clear()
        for model in models:
            name = model.wish.name
            resting_model = self._rests.get(name)
            values = fingerprint(model)
            if (
                resting_model is None
                or resting_model.valid_until <= now_s
                or resting_model.circumstances != circumstances
                or name in names
                or resting_model.values != values
            ):
                self._rests.pop(name, None)
                self._looks[name] = values
                awake_models.append(model)
        return awake_models

    def record(self, models: Iterable[ManagedModel], circumstances: object, now_s: float) -> None:
        """Let the models rest that need nothing, and that are as `awake` saw them."""
        for model in models:
            name = model.wish.name
            if is_at_rest(model) and self._looks.get(name) == (values := fingerprint(model)):
                self._rests[name] = _Rest(values, circumstances, _next_look(model, now_s))

    def retain(self, names: Collection[str]) -> None:
        """Forget all other models."""
        if len(self._rests) > len(names):
            self._rests = {
                name: resting_model for name, resting_model in self._rests.items() if name in names
            }

    def __contains__(self, name: str) -> bool:
        return name in self._rests


def _next_look(model: ManagedModel, now_s: float) -> float:
    looks = [
        replica.planning.blocked_at + replica.planning.replan_s
        for replica in model.replicas
        if replica.planning.blocked_reason is not None
    ]
    return min([now_s + _MAX_REST_S, *looks])
