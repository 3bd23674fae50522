"""Of several plans the one that its owner would choose comes first."""

from __future__ import annotations

from gateway.domain import Estimate, Speed
from gateway.engines.common.speed.objective import (
    Penalties,
    PlanOutcome,
    gpu_discount,
    rating,
    score,
)


def speed(stream: float, total: float) -> Speed:
    def make_estimate(value: float) -> Estimate:
        return Estimate(value=value, low=value, high=value)

    return Speed(
        stream=make_estimate(stream),
        total=make_estimate(total),
        concurrency=8,
        first_token_2k_s=make_estimate(1),
        source="",
    )


def test_each_goal_has_its_own_best() -> None:
    quick = PlanOutcome(speed(200, 1000), 8_000, 8_000, 1)
    wide = PlanOutcome(speed(50, 9000), 8_000, 8_000, 1)
    roomy = PlanOutcome(speed(40, 800), 128_000, 8_000, 1)
    every = [quick, wide, roomy]
    assert max(every, key=lambda one: score(one, "latency", 0)) is quick
    assert max(every, key=lambda one: score(one, "throughput", 0)) is wide
    assert max(every, key=lambda one: score(one, "context", 0)) is roomy
    both = PlanOutcome(speed(150, 6000), 8_000, 8_000, 1)
    assert max([*every, both], key=lambda one: score(one, "balanced", 0)) is both


def test_more_gpus_have_to_be_worth_it_where_others_might_want_them() -> None:
    one, two = (
        PlanOutcome(speed(100, 1000), 8_000, 8_000, 1),
        PlanOutcome(speed(130, 1300), 8_000, 8_000, 2),
    )
    assert score(two, "balanced", gpu_discount(None)) > score(one, "balanced", gpu_discount(None))
    assert score(two, "balanced", gpu_discount("few")) < score(one, "balanced", gpu_discount("few"))
    barely = PlanOutcome(speed(104, 1040), 8_000, 8_000, 2)
    assert score(barely, "balanced", gpu_discount(None)) < score(
        one, "balanced", gpu_discount(None)
    )
    assert score(barely, "balanced", gpu_discount("all")) > score(
        one, "balanced", gpu_discount("all")
    )


def test_where_nothing_is_known_few_gpus_are_best() -> None:
    few, many = PlanOutcome(None, 8_000, 8_000, 1), PlanOutcome(None, 8_000, 8_000, 8)
    assert score(few, "balanced", gpu_discount("all")) > score(
        many, "balanced", gpu_discount("all")
    )


def test_what_else_is_known_decides_between_plans_that_are_nearly_as_good() -> None:
    plain = Penalties(weak=False, changes=0, older=0)
    for worse in (Penalties(True, 0, 0), Penalties(False, 3, 0), Penalties(False, 0, 3)):
        assert rating(100, plain) > rating(104, worse)
        assert rating(100, plain) < rating(120, worse)


def test_a_published_weakness_outweighs_a_few_tokens_of_context() -> None:
    assert rating(26_048, Penalties(False, 0, 1)) > rating(26_624, Penalties(True, 0, 0))


def test_one_engine_is_better_than_copies_that_give_no_more() -> None:
    one, copies = Penalties(False, 0, 0), Penalties(False, 0, 0, copies=True)
    assert rating(100, one) > rating(101, copies)
    assert rating(100, one) < rating(104, copies)
