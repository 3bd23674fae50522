"""The models and replicas of the previous gateway, read from the database."""

from __future__ import annotations

import time
from collections.abc import Mapping

from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.domain import Attempt
from gateway.domain.running import TRIAL_GENERATION
from gateway.store.store import Store


def load_models(store: Store) -> dict[str, ManagedModel]:
    """All models by name. Raises StoreError."""
    attempts = _attempts_by_replica(store)
    changes = store.changes()
    residences = store.residences()
    models: dict[str, ManagedModel] = {}
    for wish, created_at, deleting, forgiven_at in store.models():
        generation, change = changes.get(wish.name, (0, None))
        model = ManagedModel(
            wish,
            created_at,
            deleting,
            forgiven_at=forgiven_at,
            generation=generation,
            change=change,
        )
        models[wish.name] = model
        live_count = _restore_replicas(store, model, attempts.get(wish.name, {}))
        model.is_stopped, model.used_at = residences.get(wish.name, (False, 0.0))
        if model.is_stopped:
            model.show_stop()
        # Whether running engines have requests is unknown.
        model.is_unused = not live_count
        model.was_evicted = model.waits_for_request = not model.is_stopped and any(
            _was_unloaded(replica) for replica in model.replicas
        )
        model.pins.update(_image_digests(model))
    return models


def _attempts_by_replica(store: Store) -> dict[str, dict[int, list[Attempt]]]:
    """All attempts by model and replica, oldest first, without measurements of a plan.

    The engine of such a measurement stops as an orphan.
    """
    attempts: dict[str, dict[int, list[Attempt]]] = {}
    for attempt in store.attempts():
        if attempt.generation != TRIAL_GENERATION:
            replicas = attempts.setdefault(attempt.model, {})
            replicas.setdefault(attempt.replica, []).append(attempt)
        elif attempt.is_live:
            _finish_trial(store, attempt)
    return attempts


def _restore_replicas(
    store: Store, model: ManagedModel, attempts: Mapping[int, list[Attempt]]
) -> int:
    """Add the replicas of a model. Returns the number of those up to the last live one."""
    past_count = max((index + 1 for index in attempts), default=1)
    live_count = max(
        (index + 1 for index, past in attempts.items() if any(attempt.is_live for attempt in past)),
        default=0,
    )
    if model.wish.source:
        for index in range(max(model.wish.least_copies or past_count, live_count)):
            _restore_replica(store, model, index, attempts.get(index, []))
    return live_count


def _was_unloaded(replica: ReplicaState) -> bool:
    """Whether the last engine was stopped without a failure."""
    last_attempt = replica.history[-1] if replica.history else None
    return (
        replica.attempt is None
        and last_attempt is not None
        and last_attempt.state == "stopped"
        and last_attempt.failure is None
    )


def _image_digests(model: ManagedModel) -> dict[str, str]:
    """The digests of images by name, by the attempts since the last `retry`."""
    engines = (
        attempt.plan.engine
        for replica in model.replicas
        for attempt in replica.attempts
        if attempt.started_at > model.forgiven_at
    )
    return {engine.image: engine.digest for engine in engines if engine.image and engine.digest}


def _restore_replica(store: Store, model: ManagedModel, index: int, past: list[Attempt]) -> None:
    """Add a replica with its live and past attempts to the model."""
    name = model.wish.name
    live = [attempt for attempt in past if attempt.is_live]
    replica = ReplicaState(
        name, index, live[0] if live else None, generation=_generation(model, past)
    )
    replica.succession.awaits_successor = _awaits_successor(past)
    if (
        len(live) > 1
        and model.trial is None
        and live[0].generation != live[1].generation == model.wanted_generation
    ):
        model.trial = ReplicaState(name, index, live[1], generation=model.wanted_generation)
        model.trial.succession.seeks_plan = True
    trial_attempt = model.trial.attempt if model.trial is not None else None
    ended_attempts = [
        past_attempt
        for past_attempt in past
        if past_attempt is not replica.attempt and past_attempt is not trial_attempt
    ]
    replica.history = [
        _finish_trial(store, past_attempt) if past_attempt.is_live else past_attempt
        for past_attempt in ended_attempts
    ]
    model.replicas.append(replica)


def _generation(model: ManagedModel, past: list[Attempt]) -> int:
    """The generation of a replica, by its attempts."""
    if not past or _awaits_successor(past):
        return model.wanted_generation
    return next((attempt for attempt in past if attempt.is_live), past[-1]).generation


def _awaits_successor(past: list[Attempt]) -> bool:
    """Whether the last serving engine was stopped for one of the wanted wish."""
    return (
        bool(past)
        and not any(attempt.is_live for attempt in past)
        and past[-1].state == "stopped"
        and past[-1].ready_at is not None
    )


def _finish_trial(store: Store, attempt: Attempt) -> Attempt:
    """Record the end of a trial that was live when the gateway died. The older attempt serves."""
    ended_attempt = attempt.evolve(state="stopped", ended_at=time.time())
    store.save_attempt(ended_attempt)
    return ended_attempt
