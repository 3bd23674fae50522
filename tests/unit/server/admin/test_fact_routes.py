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
    former_plan = plan(max_context=4096)
    used = former_plan.memory.budget_bytes - former_plan.memory.kv_bytes
    scope = {key: value for key, value in former_plan.scope.items() if key != "budget"}
    scope["max_num_batched_tokens"] = str(former_plan.max_num_batched_tokens.value)
    failed = fact("needs_memory", scope, value=used + GIB)
    later_plan = make_decision(
        facts=(failed,), max_context=4096, tensor_parallel=former_plan.tensor_parallel.value
    ).plans[0]
    assert later_plan.memory.kv_bytes == former_plan.memory.kv_bytes - GIB
    # With another batch it proves nothing, and more than there is leaves no plan of this size.
    other = failed.evolve(scope=scope | {"max_num_batched_tokens": "1"})
    assert make_decision(facts=(other,), max_context=4096).plans[0].memory == former_plan.memory
    hopeless = make_decision(
        facts=(failed.evolve(value=30 * GIB),), tensor_parallel=former_plan.tensor_parallel.value
    )
    assert {rejection.verdict for rejection in hopeless.rejected} >= {"no_memory"}


def test_a_good_start_makes_the_band_narrow_and_changes_nothing_else() -> None:
    former_plan = plan(max_context=4096)
    scope = {key: value for key, value in former_plan.scope.items() if key != "budget"}
    scope["max_num_batched_tokens"] = str(former_plan.max_num_batched_tokens.value)
    measured = former_plan.memory.budget_bytes - former_plan.memory.kv_bytes - GIB // 4
    later_plan = make_decision(
        facts=(fact("needs_memory", scope, value=measured, grade="verified"),), max_context=4096
    ).plans[0]
    assert later_plan.fingerprint == former_plan.fingerprint
    assert later_plan.memory.high - later_plan.memory.low <= GIB // 8
    assert later_plan.memory.low < measured < later_plan.memory.high


def test_memory_that_ran_out_while_serving_is_left_free() -> None:
    former_plan = plan(max_context=4096)
    scope = {key: value for key, value in former_plan.scope.items() if key != "budget"}
    later_plan = make_decision(
        facts=(fact("spare_memory", scope, value=GIB),), max_context=4096
    ).plans[0]
    assert (
        GIB
        <= former_plan.memory.budget_bytes - later_plan.memory.budget_bytes
        <= GIB + former_plan.memory.gpu_bytes // 100
    )


@pytest.mark.parametrize(
    ("under", "driver", "stale"),
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
    under: dict[str, str], driver: str | None, stale: bool
) -> None:
    one = fact("plan_failed", {"fingerprint": "x"}, under=under)
    assert (stale_reason(one, driver, {"engine:1"}) is not None) is stale
    assert valid_facts([one], driver, {"engine:1"}) == ([] if stale else [one])
