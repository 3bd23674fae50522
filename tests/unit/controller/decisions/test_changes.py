"""The next step of a changed wish, of every row of the table."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.controller.decisions.changes import (
    AbandonChange,
    Adopt,
    CompleteChange,
    EndTrial,
    ReplaceInPlace,
    ReplicaStatus,
    RestartWithWish,
    StartTrial,
    StopRouting,
    TrialStatus,
    diff_plans,
    diff_wishes,
    is_as_good,
    may_need_restart,
    next_step,
    no_effect_reason,
    starts_same_engine,
)
from tests.support.examples import quicker
from tests.support.makers import plan, wish

NEW = 1


def replica(
    index: int = 0, generation: int = 0, *, is_serving: bool = True, **fields: Any
) -> ReplicaStatus:
    return ReplicaStatus(index, generation, is_serving, **fields)


def trial(state: Any, generation: int = NEW, reason: str = "") -> TrialStatus:
    return TrialStatus(0, generation, state, reason)


@pytest.mark.parametrize(
    ("replicas", "tried", "step"),
    [
        ([replica()], None, StartTrial(0)),
        ([replica(0, NEW), replica(1)], None, StartTrial(1)),
        ([replica()], trial("starts"), None),
        ([replica()], trial("ready"), Adopt()),
        ([replica()], trial("stops", 0), None),
        ([replica()], trial("unrelated", 0), EndTrial()),
        ([replica()], trial("no_memory"), ReplaceInPlace(0)),
        ([replica()], trial("failed", reason="why"), AbandonChange("why")),
        ([replica(is_serving=False)], None, RestartWithWish(0)),
        ([replica(must_be_replaced=True)], None, StopRouting(0)),
        (
            [
                replica(0, NEW, is_serving=False, is_starting=True),
                replica(1, must_be_replaced=True),
            ],
            None,
            None,
        ),
        ([replica(must_be_replaced=True, is_unrouted=True, answers_requests=True)], None, None),
        ([replica(must_be_replaced=True, is_unrouted=True)], None, RestartWithWish(0)),
        (
            [replica(0, NEW, is_serving=False, failure="why"), replica(1)],
            None,
            AbandonChange("why"),
        ),
        ([replica(0, NEW, is_serving=False)], None, None),
        ([replica(0, NEW), replica(1, NEW)], None, CompleteChange()),
    ],
)
def test_a_new_wish_takes_one_step_after_the_other(
    replicas: list[ReplicaStatus], tried: TrialStatus | None, step: object
) -> None:
    assert next_step(NEW, True, replicas, tried) == step


@pytest.mark.parametrize(
    ("replicas", "tried", "step"),
    [
        ([replica(0, NEW)], None, StartTrial(0)),
        ([replica(0, NEW, is_serving=False, failure="why")], None, RestartWithWish(0)),
        ([replica(0, NEW)], trial("failed", 0, "why"), ReplaceInPlace(0)),
        ([replica(0, NEW)], trial("ready", 0), Adopt()),
        ([replica(0, 0, is_serving=False, failure="why")], None, None),
        ([replica(0, 0)], None, None),
    ],
)
def test_a_failed_change_steps_back_to_the_former_wish(
    replicas: list[ReplicaStatus], tried: TrialStatus | None, step: object
) -> None:
    assert next_step(0, False, replicas, tried) == step


@settings(max_examples=quicker(300), deadline=None)
@given(
    count=st.integers(1, 4), room=st.booleans(), fails_at=st.integers(0, 5), serving=st.booleans()
)
def test_every_change_ends_and_replicas_leave_one_at_a_time(
    count: int, room: bool, fails_at: int, serving: bool
) -> None:
    """Played through: starts succeed but for one of them; in the end all replicas are by the wish
    in force."""
    now = [replica(index, 0, is_serving=serving or index > 0) for index in range(count)]
    trial: TrialStatus | None = None
    generation, new, starts, is_finished = NEW, True, 0, False
    for _ in range(20 * count + 20):
        step = next_step(generation, new, now, trial)
        absent_count = sum(not replica.is_serving or replica.is_unrouted for replica in now)
        assert absent_count <= 1 or not serving
        match step:
            case StartTrial(index):
                fails = starts == fails_at and room and new
                starts += room
                trial = TrialStatus(
                    index,
                    generation,
                    "failed" if fails else "ready" if room else "no_memory",
                    "why",
                )
            case Adopt():
                assert trial is not None
                now[trial.index] = replica(trial.index, generation)
                trial = None
            case EndTrial():
                trial = None
            case ReplaceInPlace(index):
                now[index] = replica(
                    index,
                    now[index].generation,
                    is_serving=now[index].is_serving,
                    must_be_replaced=True,
                )
                trial = None
            case StopRouting(index):
                now[index] = replica(
                    index, now[index].generation, must_be_replaced=True, is_unrouted=True
                )
            case RestartWithWish(index):
                fails = starts == fails_at and new
                starts += 1
                now[index] = replica(
                    index, generation, is_serving=not fails, failure="why" if fails else ""
                )
            case AbandonChange():
                generation, new, trial = 0, False, None
            case CompleteChange():
                is_finished = True
                break
            case None:
                break
    assert all(replica.generation == generation and replica.is_serving for replica in now)
    assert is_finished == new


def test_a_change_that_the_engine_does_not_see_restarts_nothing() -> None:
    assert not may_need_restart(wish(), wish(policy={"wait_s": 5}, check=False))
    assert may_need_restart(wish(), wish(policy={"allow_remote_code": True}))
    assert may_need_restart(wish(), wish(max_context=5))


def test_a_plan_on_other_gpus_of_one_kind_is_the_same_start() -> None:
    first_plan = plan()
    assert starts_same_engine(first_plan.evolve(gpus=("GPU-x",) * len(first_plan.gpus)), first_plan)
    assert not starts_same_engine(first_plan.evolve(gpus=(*first_plan.gpus, "GPU-x")), first_plan)
    assert not starts_same_engine(first_plan.evolve(argv=(*first_plan.argv, "--x")), first_plan)


def test_a_wish_that_keeps_the_plan_has_a_reason() -> None:
    first_plan = plan()
    text = (
        f"max model len stays {first_plan.max_model_len.value}: {first_plan.max_model_len.reason}"
    )
    assert (
        no_effect_reason(diff_wishes(wish(), wish(max_context=10**6)), first_plan, first_plan)
        == text
    )
    assert "follows from engines" in no_effect_reason(
        diff_wishes(wish(), wish(engines=["vllm"])), first_plan, first_plan
    )
    # A policy is not part of a plan, and another plan speaks for itself.
    assert not no_effect_reason(
        diff_wishes(wish(), wish(policy={"wait_s": 5})), first_plan, first_plan
    )
    other_plan = first_plan.evolve(argv=(*first_plan.argv, "--seed=3"))
    assert not no_effect_reason(diff_wishes(wish(), wish(max_context=5)), first_plan, other_plan)


def test_a_plan_beside_that_holds_less_is_not_as_good() -> None:
    first_plan = plan()
    assert is_as_good(first_plan, first_plan)
    less = first_plan.memory.evolve(kv_tokens=first_plan.memory.kv_tokens // 2)
    assert not is_as_good(first_plan.evolve(memory=less), first_plan)
    shorter = first_plan.max_model_len.evolve(value=first_plan.max_model_len.value // 2)
    assert not is_as_good(first_plan.evolve(max_model_len=shorter), first_plan)


def test_differences_name_changed_fields_and_no_secret() -> None:
    differences = diff_wishes(wish(), wish(env={"NCCL_DEBUG": "INFO"}, max_context=5))
    assert [
        (difference.field, difference.former, difference.present) for difference in differences
    ] == [
        ("max_context", None, "5"),
        ("env", None, "NCCL_DEBUG"),
    ]
    first_plan = plan()
    other_plan = first_plan.evolve(
        argv=(*first_plan.argv, "--seed=3"), env={**first_plan.env, "NCCL_DEBUG": "INFO"}
    )
    assert [
        (diff_plan.field, diff_plan.former, diff_plan.present)
        for diff_plan in diff_plans(first_plan, other_plan)
    ] == [
        ("--seed", None, "3"),
        ("variable NCCL_DEBUG", None, "set"),
    ]
