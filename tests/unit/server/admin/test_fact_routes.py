"""Facts as the admin API shows them: origin, scope, and which are stale."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.diagnosis.facts.known_facts import KnownFacts
from gateway.diagnosis.facts.scope import stale_reason, valid_facts
from gateway.domain import Fact
from tests.support.makers import GIB, make_decision, plan


def fact(kind: str, scope: dict[str, str], **fields: Any) -> Fact:
    return Fact.model_validate(
        {"kind": kind, "scope": scope, "grade": "failed", "source": "a line", **fields}
    )


def test_a_fact_holds_where_its_whole_scope_is_true() -> None:
    facts = [
        fact("max_context", {"engine": "a"}),
        fact("max_context", {"engine": "a", "gpu": "b"}),
        fact("plan_failed", {}),
    ]
    known_facts = KnownFacts(facts)
    assert (
        list(known_facts.holding("max_context", {"engine": "a", "gpu": "c", "more": "d"}))
        == facts[:1]
    )
    assert list(known_facts.holding("max_context", {"engine": None})) == []


def test_memory_that_an_engine_needed_is_not_planned_away_again() -> None:
    first_plan = plan(max_context=4096)
    used_bytes = first_plan.memory.budget_bytes - first_plan.memory.kv_bytes
    scope = {key: value for key, value in first_plan.scope.items() if key != "budget"}
    scope["max_num_batched_tokens"] = str(first_plan.max_num_batched_tokens.value)
    failed_fact = fact("needs_memory", scope, value=used_bytes + GIB)
    later_plan = make_decision(
        facts=(failed_fact,), max_context=4096, tensor_parallel=first_plan.tensor_parallel.value
    ).plans[0]
    assert later_plan.memory.kv_bytes == first_plan.memory.kv_bytes - GIB
    # The fact proves nothing for another batch, and a larger value than the memory leaves no plan
    # of this size.
    other_fact = failed_fact.evolve(scope=scope | {"max_num_batched_tokens": "1"})
    assert make_decision(facts=(other_fact,), max_context=4096).plans[0].memory == first_plan.memory
    hopeless = make_decision(
        facts=(failed_fact.evolve(value=30 * GIB),),
        tensor_parallel=first_plan.tensor_parallel.value,
    )
    assert {rejection.verdict for rejection in hopeless.rejected} >= {"no_memory"}


def test_a_good_start_makes_the_band_narrow_and_changes_nothing_else() -> None:
    first_plan = plan(max_context=4096)
    scope = {key: value for key, value in first_plan.scope.items() if key != "budget"}
    scope["max_num_batched_tokens"] = str(first_plan.max_num_batched_tokens.value)
    used_bytes = first_plan.memory.budget_bytes - first_plan.memory.kv_bytes - GIB // 4
    later_plan = make_decision(
        facts=(fact("needs_memory", scope, value=used_bytes, grade="verified"),), max_context=4096
    ).plans[0]
    assert later_plan.fingerprint == first_plan.fingerprint
    assert later_plan.memory.high - later_plan.memory.low <= GIB // 8
    assert later_plan.memory.low < used_bytes < later_plan.memory.high


def test_memory_that_ran_out_while_serving_is_left_free() -> None:
    first_plan = plan(max_context=4096)
    scope = {key: value for key, value in first_plan.scope.items() if key != "budget"}
    plan_after = make_decision(
        facts=(fact("spare_memory", scope, value=GIB),), max_context=4096
    ).plans[0]
    assert (
        GIB
        <= first_plan.memory.budget_bytes - plan_after.memory.budget_bytes
        <= GIB + first_plan.memory.gpu_bytes // 100
    )


@pytest.mark.parametrize(
    ("conditions", "driver", "stale"),
    [
        ({}, "580.1", False),
        ({"driver": "580.1"}, "580.1", False),
        ({"driver": "570.0"}, "580.1", True),
        ({"driver": "570.0"}, None, False),
        ({"image": "engine:1"}, None, False),
        ({"image": "engine:0"}, None, True),
    ],
)
def test_the_conditions_of_a_fact_may_be_gone(
    conditions: dict[str, str], driver: str | None, stale: bool
) -> None:
    old_fact = fact("plan_failed", {"fingerprint": "x"}, under=conditions)
    assert (stale_reason(old_fact, driver, {"engine:1"}) is not None) is stale
    assert valid_facts([old_fact], driver, {"engine:1"}) == ([] if stale else [old_fact])
