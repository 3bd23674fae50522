"""The models and replicas of the previous gateway, read from the database."""

from __future__ import annotations

import time

from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.domain import Attempt
from gateway.domain.running import TRIAL_GENERATION
from gateway.store.store import Store


def load_models(store: Store) -> dict[str, ManagedModel]:
    """All models by name. Raises StoreError."""
    models: dict[str, ManagedModel] = {}
    history: dict[tuple[str, int], list[Attempt]] = {}
    for attempt in store.attempts():
        if attempt.generation == TRIAL_GENERATION:
            # It only measured a plan for the previous gateway. Its engine stops as an orphan.
            if attempt.live:
                _end_trial(store, attempt)
            continue
        history.setdefault((attempt.model, attempt.replica), []).append(attempt)
    changes = store.changes()
    residences = store.residences()
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
        replicas = {index: past for (name, index), past in history.items() if name == wish.name}
        replica_count = max((index + 1 for index in replicas), default=1)
        live = [
            index
            for index, past in replicas.items()
            if any(past_attempt.live for past_attempt in past)
        ]
        alive = max((index + 1 for index in live), default=0)
        for index in range(max(wish.replicas or replica_count, alive) if wish.source else 0):
            _restore_replica(store, model, index, replicas.get(index, []))
        model.stopped, model.used_at = residences.get(wish.name, (False, 0.0))
        # Whether running engines have requests is unknown.
        model.unused = not alive
        model.gave_way = model.on_request = not model.stopped and any(
            copy_of_model.attempt is None
            and copy_of_model.history
            and copy_of_model.history[-1].state == "stopped"
            and copy_of_model.history[-1].failure is None
            for copy_of_model in model.replicas
        )
        for attempt in (
            past_attempt
            for replica in model.replicas
            for past_attempt in replica.attempts
            if past_attempt.started_at > forgiven_at
        ):
            engine = attempt.plan.engine
            if engine.image and engine.digest:
                model.pins[engine.image] = engine.digest
    return models


def _restore_replica(store: Store, model: ManagedModel, index: int, past: list[Attempt]) -> None:
    name, live = model.wish.name, [attempt for attempt in past if attempt.live]
    replica = ReplicaState(
        name, index, live[0] if live else None, generation=_generation(model, past)
    )
    replica.made_room = _made_room(past)
    if (
        len(live) > 1
        and model.trial is None
        and live[0].generation != live[1].generation == model.wanted_generation
    ):
        model.trial = ReplicaState(
            name, index, live[1], generation=model.wanted_generation, seeks=True
        )
    trial_attempt = model.trial.attempt if model.trial is not None else None
    ended = [
        past_attempt
        for past_attempt in past
        if past_attempt is not replica.attempt and past_attempt is not trial_attempt
    ]
    replica.history = [
        _end_trial(store, past_attempt) if past_attempt.live else past_attempt
        for past_attempt in ended
    ]
    model.replicas.append(replica)


def _generation(model: ManagedModel, past: list[Attempt]) -> int:
    """The generation of a replica, by its attempts."""
    if not past or _made_room(past):
        return model.wanted_generation
    return next((attempt for attempt in past if attempt.live), past[-1]).generation


def _made_room(past: list[Attempt]) -> bool:
    """Whether the last serving engine was stopped for one of the wanted wish."""
    return (
        bool(past)
        and not any(attempt.live for attempt in past)
        and past[-1].state == "stopped"
        and past[-1].ready_at is not None
    )


def _end_trial(store: Store, attempt: Attempt) -> Attempt:
    """Record the end of a trial that was live when the gateway died. The older attempt serves."""
    ended = attempt.evolve(state="stopped", ended_at=time.time())
    store.save_attempt(ended)
    return ended
