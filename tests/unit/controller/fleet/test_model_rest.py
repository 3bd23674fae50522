"""The rest of models: which values end it, and when it ends by itself."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from gateway.controller.decisions.eviction import Eviction
from gateway.controller.decisions.reconcile import NoAction
from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import (
    REPLAN_S,
    ManagedModel,
    ReplicaPlanning,
    ReplicaRollout,
    ReplicaState,
)
from gateway.controller.fleet.model_rest import (
    MODEL_FIELDS,
    REPLICA_FIELDS,
    RestingModels,
    is_at_rest,
)
from gateway.domain import Offer
from tests.support.makers import attempt, wish

# Fields that no value of the fingerprint repeats, with the reason.
_OTHER_MODEL_FIELDS = {
    "idempotency_key": "it never changes",
    "replicas": "their fields are part of it",
    "endpoints": "their route, state and detail are part of it",
    "decision": "it follows a plan, which is a task",
    "answers": "an inquiry is a task",
    "pins": "an inquiry is a task",
    "inquiry_problems": "an inquiry is a task",
    "inquiry_lock": "an inquiry is a task",
    "measured_plan": "of a serving plan",
    "no_giving_until_s": "of a serving plan",
    "copy_hold_reason": "of a serving model, and no model with an engine rests",
    "evictable_copies_at_last_plan": "of a model with requests, which does not rest",
}
_OTHER_REPLICA_FIELDS = {
    "model": "it never changes",
    "index": "it never changes",
    "history": "the number of its last attempt is part of it, and no ended attempt changes",
    "watcher": "an engine is watched, and no model with one rests",
    "retired_watcher": "its engine has ended, and it copies lines alone",
    "preparation": "no replica with one rests",
    "early_inquiry": "no replica with one rests",
    "is_stopping": "a stop is a task",
    "planning.is_outdated": "of a plan that is being made, which is a task",
    "planning.failure_count": "it changes with `looks_again`, or a plan is made after it",
    "planning.failed_planning": "it changes with `blocked_reason`",
    "cache_receivers": "of a serving plan",
    "planning.requested_copies": "of offers that it waits for",
    "succession.seeks_plan": "of a trial",
    "succession.lacks_memory": "of a trial",
    "succession.must_be_replaced": "of a change, and no model that changes rests",
    "planning.intended_plan": "of offers that it waits for",
    "launched_attempt": "of an attempt",
    "conditions": "of an attempt",
    "succession.awaits_successor": "of a change, and no model that changes rests",
    "unsleepable_attempt": "of an attempt",
    "wake_times": "of an attempt",
}


# Parts of a replica, whose fields count as its own.
_PARTS: dict[str, Any] = {"planning": ReplicaPlanning, "succession": ReplicaRollout}


def field_names(kind: Any) -> set[str]:
    names = {field.name for field in fields(kind)}
    parts = names & _PARTS.keys()
    return (names - parts) | {
        f"{part}.{field.name}" for part in parts for field in fields(_PARTS[part])
    }


@pytest.mark.parametrize(
    ("kind", "values", "other_fields"),
    [
        (ManagedModel, MODEL_FIELDS, _OTHER_MODEL_FIELDS),
        (ReplicaState, REPLICA_FIELDS, _OTHER_REPLICA_FIELDS),
    ],
)
def test_each_field_ends_the_rest_or_has_a_reason(
    kind: Any, values: tuple[str, ...], other_fields: dict[str, str]
) -> None:
    owners = {name: name.partition(".")[0] for name in values}
    names = {name if owner in _PARTS else owner for name, owner in owners.items()}
    assert names | other_fields.keys() == field_names(kind)
    assert not names & other_fields.keys()


def model_at_rest(values: dict[str, Any] | None = None) -> ManagedModel:
    """A model at rest. values: of fields of its replica, and of the replica's parts."""
    model = Fleet().add_model(ManagedModel(wish(name="m"), 1.0))
    for name, value in ({"status": NoAction("no_plan", "no GPU")} | (values or {})).items():
        part, _, field = name.rpartition(".")
        setattr(getattr(model.replicas[0], part) if part else model.replicas[0], field, value)
    return model


def is_awake(rests: RestingModels, model: ManagedModel, **changes: Any) -> bool:
    add_defaults: dict[str, Any] = {"names": (), "circumstances": False, "now_s": 100.0} | changes
    return rests.awake([model], **add_defaults) == [model]


def test_a_model_rests_until_something_changes() -> None:
    rests, model = RestingModels(), model_at_rest()
    assert is_awake(rests, model)
    rests.record([model], False, 100.0)
    assert not is_awake(rests, model)
    assert is_awake(rests, model, names={"m"})
    assert is_awake(rests, model), "the look at it ended its rest"
    rests.record([model], False, 100.0)
    assert is_awake(rests, model, circumstances=True)
    for name, value in (
        ("is_stopped", True),
        ("load_block_reason", "it waits"),
        ("wish", wish(name="m", aliases=("n",))),
    ):
        rests.record([model], False, 100.0)
        assert not is_awake(rests, model)
        setattr(model, name, value)
        assert is_awake(rests, model), name


@pytest.mark.parametrize("name", ["wish", "generation", "forgiven_at", "is_stopped"])
def test_a_model_that_changes_during_a_pass_gets_another_look(name: str) -> None:
    rests, model = RestingModels(), model_at_rest()
    assert is_awake(rests, model)
    value = {"wish": wish(name="m", aliases=("n",)), "forgiven_at": 3.0}.get(name, 1)
    setattr(model, name, value)
    if name == "generation":
        model.replicas[0].generation = model.generation
    assert is_at_rest(model)
    rests.record([model], False, 100.0)
    assert is_awake(rests, model), "the steps of that pass saw the former value"
    rests.record([model], False, 100.0)
    assert not is_awake(rests, model)


def test_a_replica_without_a_plan_is_looked_at_when_its_plan_is_due() -> None:
    rests = RestingModels()
    model = model_at_rest({"planning.blocked_reason": "no GPU", "planning.blocked_at": 90.0})
    assert is_awake(rests, model)
    rests.record([model], False, 100.0)
    assert not is_awake(rests, model, now_s=90.0 + REPLAN_S - 1)
    assert is_awake(rests, model, now_s=90.0 + REPLAN_S + 1)
    # After a failed planning the next one is later.
    model.replicas[0].planning.failure_count = 1
    assert is_awake(rests, model, circumstances=True)
    rests.record([model], False, 90.0)
    assert not is_awake(rests, model, now_s=90.0 + REPLAN_S + 1)
    assert is_awake(rests, model, now_s=90.0 + 2 * REPLAN_S + 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attempt", attempt()),
        ("status", NoAction("starting")),
        ("status", NoAction("backing_off", "after a failure", 120.0)),
        ("eviction", Eviction("idle", "no request")),
        ("planning.looks_again", True),
        (
            "planning.awaited_offers",
            (Offer(model="n", kind="stop", bytes_by_gpu={}, keeps=0, words="n is unloaded"),),
        ),
        ("succession.unrouted_at", 3.0),
    ],
)
def test_a_model_with_work_does_not_rest(name: str, value: Any) -> None:
    assert is_at_rest(model_at_rest())
    assert not is_at_rest(model_at_rest({name: value}))


def test_a_model_with_requests_or_an_unexpected_error_does_not_rest() -> None:
    model = model_at_rest()
    model.has_requests = True
    assert not is_at_rest(model)
    model.has_requests = False
    model.setback.record_failure(ValueError("x"))
    assert not is_at_rest(model)
