"""A model and its replicas in memory."""

from __future__ import annotations

import pytest

from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState, share_parts
from gateway.controller.fleet.model_rest import fingerprint
from gateway.domain import Plan
from gateway.domain.running import MAX_ENDED_ATTEMPTS
from gateway.domain.wish import Policy
from tests.support.makers import attempt, plan, wish


def test_a_model_that_is_loaded_for_years_remembers_few_attempts() -> None:
    model, replica = ManagedModel(wish(), 0.0), ReplicaState("m", 0)
    model.replicas = [replica]
    ids = []
    for number in range(1, 1000):
        first_fingerprint = fingerprint(model)
        ids += [old_attempt.id for old_attempt in replica.remember(attempt(number, "stopped"))]
        assert fingerprint(model) != first_fingerprint, "each end of an attempt is seen"
    last = [old_attempt.id for old_attempt in replica.history]
    assert last == [*range(1000 - MAX_ENDED_ATTEMPTS, 1000)]
    assert ids == [*range(1, 1000 - MAX_ENDED_ATTEMPTS)]


def test_attempts_of_a_trial_are_put_in_order() -> None:
    replica = ReplicaState("m", 0, history=[attempt(1, "failed"), attempt(4, "failed")])
    replica.remember(attempt(2, "failed"), attempt(3, "failed"))
    assert [old_attempt.id for old_attempt in replica.history] == [1, 2, 3, 4]


def test_all_failures_that_a_wish_allows_are_remembered() -> None:
    assert Policy(max_attempts=MAX_ENDED_ATTEMPTS).max_attempts == MAX_ENDED_ATTEMPTS
    with pytest.raises(ValueError, match="max_attempts"):
        Policy(max_attempts=MAX_ENDED_ATTEMPTS + 1)


def test_remembered_plans_share_their_equal_parts() -> None:
    first_plan = plan()
    replica = ReplicaState("m", 0, history=[attempt(1, "failed", plan=first_plan)])
    parsed_plan = Plan.model_validate_json(first_plan.model_dump_json())
    other_plan = parsed_plan.evolve(memory=parsed_plan.memory.evolve(budget_bytes=1))
    replica_with_parts = share_parts(other_plan, replica)
    assert replica_with_parts == other_plan
    assert replica_with_parts.fingerprint == other_plan.fingerprint
    assert replica_with_parts.model_fields_set == other_plan.model_fields_set
    same_names = [
        name
        for name in Plan.model_fields
        if getattr(replica_with_parts, name) is getattr(first_plan, name)
    ]
    assert {"engine", "argv", "tensor_parallel"} <= {*same_names}
    assert "memory" not in same_names
