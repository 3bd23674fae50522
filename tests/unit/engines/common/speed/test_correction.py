"""Measurements take the place of expectations of the plan itself, and move those of plans like it,
the more the more alike they are."""

from __future__ import annotations

import pytest

from gateway.domain import Decision
from gateway.engines.common.speed.correction import learn_from_bench as learn
from tests.support.speed_facts import bench, learn_facts, make_decision


def stream(decision: Decision) -> float:
    speed = decision.plans[0].speed
    assert speed is not None
    return speed.stream.value


def test_a_plan_that_was_measured_says_its_own_figures() -> None:
    plan = make_decision().plans[0]
    assert plan.speed is not None
    assert plan.speed.grade == "predicted"
    after = make_decision(learn_facts(plan, 0.5)).plans[0].speed
    assert after is not None
    assert after.grade == "measured"
    assert after.stream.value == pytest.approx(plan.speed.stream.value / 2, rel=0.01)
    assert after.total.value == pytest.approx(plan.speed.total.value / 2, rel=0.01)
    assert after.first_token_2k_s.value == pytest.approx(
        plan.speed.first_token_2k_s.value * 2, rel=0.01
    )
    assert after.stream.high / after.stream.low < plan.speed.stream.high / plan.speed.stream.low
    assert "fitserve bench" in after.source


def test_a_second_measurement_is_not_multiplied_twice() -> None:
    plan = make_decision().plans[0]
    facts = learn_facts(plan, 0.5)
    second_plan = make_decision(facts).plans[0]
    assert second_plan.speed is not None
    ratios = {
        fact.value: fact.samples
        for fact in learn_facts(second_plan, 1.0, facts)
        if fact.kind == "speed_ratio"
    }
    # The second run gave as much as the first one: half of the first expectation.
    assert all(
        value == pytest.approx(500, rel=0.02) or value == pytest.approx(2000, rel=0.02)
        for value in ratios
    )
    assert set(ratios.values()) == {2}


def test_similar_plans_are_corrected_and_others_are_not() -> None:
    plan = make_decision().plans[0]
    facts = learn_facts(plan, 0.5)
    base = stream(make_decision(max_context=4096))
    longer = stream(make_decision(facts, max_context=4096))
    assert longer == pytest.approx(base / 2, rel=0.02)
    # Measurements of other ranks count half, and those of another engine version not at all.
    two, corrected_plan = (
        make_decision(facts_of_plan, gpus=2, tensor_parallel=2) for facts_of_plan in ((), facts)
    )
    assert stream(corrected_plan) == pytest.approx(stream(two) * 0.5**0.5, rel=0.02)
    assert stream(make_decision(facts, "9.9.1")) == stream(make_decision(version="9.9.1"))
    assert corrected_plan.plans[0].speed is not None
    assert (
        "corrected by what was measured of plans with its kernels"
        in corrected_plan.plans[0].speed.source
    )


def test_a_correction_of_data_sheets_is_none_of_measured_figures() -> None:
    plan = make_decision().plans[0]
    facts = learn_facts(plan, 0.5)
    (basis,) = {fact.scope["basis"] for fact in facts if fact.kind == "speed_ratio"}
    assert basis == "data sheet of NVIDIA GeForce RTX 3090"
    other_facts = tuple(
        fact.evolve(scope=fact.scope | {"basis": "memory"}) if "basis" in fact.scope else fact
        for fact in facts
    )
    assert (
        stream(make_decision(other_facts, max_context=4096))
        == stream(make_decision(max_context=4096))
        != stream(make_decision(facts, max_context=4096))
    )


def test_an_impossible_ratio_is_bounded_and_the_past_fades() -> None:
    plan = make_decision().plans[0]
    ratio = next(
        fact
        for fact in learn_facts(plan, 0.001)
        if fact.kind == "speed_ratio" and fact.scope["figure"] == "stream"
    )
    assert ratio.value == 200
    facts = learn_facts(plan, 0.5)
    for _ in range(20):
        facts = learn_facts(plan, 1.0, facts)
    last = {fact.scope["figure"]: fact for fact in facts if fact.kind == "speed_ratio"}
    assert last["stream"].value == pytest.approx(1000, rel=0.01)
    assert last["stream"].samples == 21


def test_figures_of_another_load_are_not_the_plans() -> None:
    plan = make_decision().plans[0]
    facts = learn(plan, bench(plan, 0.5, concurrency=3), (), 5.0)
    assert {fact.scope["figure"] for fact in facts} == {"stream", "first_token_2k_s"}
    second_speed = make_decision(facts).plans[0].speed
    assert second_speed is not None
    assert second_speed.grade == "predicted"


def test_a_plan_without_any_expectation_has_measured_speed() -> None:
    plan = make_decision(pace=None).plans[0]
    assert plan.speed is None
    like = make_decision().plans[0]
    facts = learn(plan, bench(like, 1.0), (), 5.0)
    speed = make_decision(facts, pace=None).plans[0].speed
    assert speed is not None
    assert like.speed is not None
    assert (speed.grade, speed.stream.value) == ("measured", like.speed.stream.value)
