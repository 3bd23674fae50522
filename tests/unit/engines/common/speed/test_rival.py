"""A running plan is compared with other plans once it was measured, and stays where the other would
be little better."""

from __future__ import annotations

import pytest

from gateway.domain import Plan
from gateway.engines.common.speed.correction import correct_by_measurement
from gateway.engines.common.speed.rival import rival
from tests.support.makers import wish
from tests.support.speed_facts import learn_facts, make_decision

WISH = wish(goal="latency", gpus="all")
NEEDED = 4 * 32768
PLANS = make_decision(gpus=None, replicas=None).plans


def rival_plan(stream: float, running: Plan, **changes: object) -> Plan:
    """Another plan that is expected to give so many times as much as the running one was expected
    to."""
    speed = running.speed
    assert speed is not None
    speed_of_plan = speed.evolve(stream=speed.stream.evolve(value=speed.stream.value * stream))
    return running.evolve(argv=(*running.argv, "--other"), speed=speed_of_plan, **changes)


def plan_after_run(part: float) -> Plan:
    plan = PLANS[0]
    return correct_by_measurement(plan, learn_facts(plan, part))


def test_an_unmeasured_rival_is_not_mentioned() -> None:
    assert rival(PLANS[0], [rival_plan(9.0, PLANS[0])], WISH, NEEDED) is None


@pytest.mark.parametrize(("part", "has_rival"), [(1.0, False), (0.9, False), (0.8, True)])
def test_the_running_plan_stays_unless_another_should_be_clearly_better(
    part: float, has_rival: bool
) -> None:
    better_plan = rival(plan_after_run(part), [rival_plan(1.0, PLANS[0])], WISH, NEEDED)
    assert (better_plan is not None) is has_rival
    if better_plan is not None:
        assert better_plan.gain == pytest.approx(1 / part, rel=0.01)


def test_a_smaller_gain_is_enough_between_measured_plans() -> None:
    better = rival_plan(1.0, PLANS[0])
    proven = better.evolve(speed=better.speed.evolve(grade="measured")) if better.speed else better
    assert rival(plan_after_run(0.9), [proven], WISH, NEEDED) is not None
    assert rival(plan_after_run(0.98), [proven], WISH, NEEDED) is None


def test_a_plan_with_another_weakness_is_no_rival() -> None:
    slow = plan_after_run(0.5)
    assert rival(slow, [slow], WISH, NEEDED) is None
    assert rival(slow, [rival_plan(1.0, PLANS[0], verdict="degraded")], WISH, NEEDED) is None
    assert (
        rival(slow, [rival_plan(1.0, PLANS[0], advice="Known weaknesses of it")], WISH, NEEDED)
        is None
    )
    short = PLANS[0].max_model_len.evolve(value=1024)
    assert rival(slow, [rival_plan(1.0, PLANS[0], max_model_len=short)], WISH, NEEDED) is None


def test_room_for_more_contexts_than_ask_at_once_is_worth_nothing() -> None:
    """As in the planner: one request at once needs one context, however many there is room for."""
    balanced_wish, slow = wish(gpus="all", concurrency=1), plan_after_run(0.9)
    memory = slow.memory.evolve(kv_tokens=slow.memory.kv_tokens * 3)
    roomy = rival_plan(1.0, PLANS[0], memory=memory)
    assert rival(slow, [roomy], balanced_wish, slow.memory.kv_tokens) is None
    assert rival(slow, [roomy], balanced_wish, 3 * slow.memory.kv_tokens) is not None
