"""Of several plans the one that its owner would choose comes first."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import Estimate, Speed
from gateway.engines.common.speed.objective import (
    Penalties,
    PlanOutcome,
    gpu_discount,
    rating,
    score,
)
from tests.support.makers import wish


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
    outcomes = [quick, wide, roomy]
    assert max(outcomes, key=lambda outcome: score(outcome, "latency", 0)) is quick
    assert max(outcomes, key=lambda outcome: score(outcome, "throughput", 0)) is wide
    assert max(outcomes, key=lambda outcome: score(outcome, "context", 0)) is roomy
    best_outcome = PlanOutcome(speed(150, 6000), 8_000, 8_000, 1)
    assert (
        max([*outcomes, best_outcome], key=lambda outcome: score(outcome, "balanced", 0))
        is best_outcome
    )


def worth(outcome: PlanOutcome, **fields: Any) -> float:
    """The score of an outcome for a wish with these fields."""
    made_for = wish(**fields)
    return score(outcome, made_for.goal, gpu_discount(made_for))


ONE = PlanOutcome(speed(100, 1000), 8_000, 8_000, 1)


def two_gpus(gain: float) -> PlanOutcome:
    """The outcome of two GPUs that are so many times as good as one."""
    context = round(8_000 * gain)
    return PlanOutcome(speed(100 * gain, 1000 * gain), context, context, 2)


@pytest.mark.parametrize("goal", ["balanced", "latency", "context"])
def test_a_doubling_of_gpus_has_to_give_a_quarter_while_nobody_asked_for_all(goal: str) -> None:
    assert worth(two_gpus(1.26), goal=goal) > worth(ONE, goal=goal)
    assert worth(two_gpus(1.24), goal=goal) < worth(ONE, goal=goal)
    assert worth(two_gpus(1.24), goal=goal, gpus="all") > worth(ONE, goal=goal, gpus="all")
    assert worth(two_gpus(1.24), goal=goal, gpus=2) > worth(ONE, goal=goal, gpus=2)
    assert worth(two_gpus(1.26), goal=goal, gpus="few") < worth(ONE, goal=goal, gpus="few")


def test_throughput_takes_a_doubling_for_a_ninth() -> None:
    assert worth(two_gpus(1.12), goal="throughput") > worth(ONE, goal="throughput")
    assert worth(two_gpus(1.1), goal="throughput") < worth(ONE, goal="throughput")


def test_each_doubling_is_judged_by_itself() -> None:
    """Two doublings of a fifth each are as little worth as one."""
    four = PlanOutcome(speed(144, 1440), 8_000, 11_520, 4)
    assert worth(four) < worth(ONE)
    four = PlanOutcome(speed(160, 1600), 8_000, 12_800, 4)
    assert worth(four) > worth(ONE)


def test_few_gpus_are_best_if_nothing_is_known() -> None:
    one_gpu, eight_gpus = PlanOutcome(None, 8_000, 8_000, 1), PlanOutcome(None, 8_000, 8_000, 8)
    assert worth(one_gpu, gpus="all") > worth(eight_gpus, gpus="all")


def test_penalties_decide_between_plans_that_are_nearly_as_good() -> None:
    plain = Penalties(is_weak=False, changes=0, older=0)
    for worse in (Penalties(True, 0, 0), Penalties(False, 3, 0), Penalties(False, 0, 3)):
        assert rating(100, plain) > rating(104, worse)
        assert rating(100, plain) < rating(120, worse)


def test_a_published_weakness_outweighs_a_few_tokens_of_context() -> None:
    assert rating(26_048, Penalties(False, 0, 1)) > rating(26_624, Penalties(True, 0, 0))


def test_one_engine_is_better_than_copies_that_give_no_more() -> None:
    single_engine, copies = Penalties(False, 0, 0), Penalties(False, 0, 0, has_copies=True)
    assert rating(100, single_engine) > rating(101, copies)
    assert rating(100, single_engine) < rating(104, copies)
