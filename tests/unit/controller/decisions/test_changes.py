"""The next step of a changed wish, of every row of the table."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.controller.decisions.changes import (
    Adopt,
    EndTrial,
    Finish,
    GiveUp,
    GoInPlace,
    Replace,
    ReplicaStatus,
    StopRouting,
    TrialStatus,
    TryBeside,
    diff_plans,
    diff_wishes,
    is_as_good,
    may_need_restart,
    next_step,
    starts_same_engine,
    why_no_effect,
)
from tests.support.examples import quicker
from tests.support.makers import plan, wish

NEW = 1


def replica(
    index: int = 0, generation: int = 0, *, serves: bool = True, **fields: Any
) -> ReplicaStatus:
    return ReplicaStatus(index, generation, serves, **fields)


def trial(state: Any, generation: int = NEW, reason: str = "") -> TrialStatus:
    return TrialStatus(0, generation, state, reason)


@pytest.mark.parametrize(
    ("replicas", "tried", "step"),
    [
        ([replica()], None, TryBeside(0)),
        ([replica(0, NEW), replica(1)], None, TryBeside(1)),
        ([replica()], trial("starts"), None),
        ([replica()], trial("ready"), Adopt()),
        ([replica()], trial("stops", 0), None),
        ([replica()], trial("unrelated", 0), EndTrial()),
        ([replica()], trial("no_room"), GoInPlace(0)),
        ([replica()], trial("failed", reason="why"), GiveUp("why")),
        ([replica(serves=False)], None, Replace(0)),
        ([replica(must_be_replaced=True)], None, StopRouting(0)),
        (
            [replica(0, NEW, serves=False, is_starting=True), replica(1, must_be_replaced=True)],
            None,
            None,
        ),
        ([replica(must_be_replaced=True, is_unrouted=True, answers=True)], None, None),
        ([replica(must_be_replaced=True, is_unrouted=True)], None, Replace(0)),
        ([replica(0, NEW, serves=False, failed="why"), replica(1)], None, GiveUp("why")),
        ([replica(0, NEW, serves=False)], None, None),
        ([replica(0, NEW), replica(1, NEW)], None, Finish()),
    ],
)
def test_the_next_step_to_a_new_wish(
    replicas: list[ReplicaStatus], tried: TrialStatus | None, step: object
) -> None:
    assert next_step(NEW, True, replicas, tried) == step


@pytest.mark.parametrize(
    ("replicas", "tried", "step"),
    [
        ([replica(0, NEW)], None, TryBeside(0)),
        ([replica(0, NEW, serves=False, failed="why")], None, Replace(0)),
        ([replica(0, NEW)], trial("failed", 0, "why"), GoInPlace(0)),
        ([replica(0, NEW)], trial("ready", 0), Adopt()),
        ([replica(0, 0, serves=False, failed="why")], None, None),
        ([replica(0, 0)], None, None),
    ],
)
def test_the_next_step_back_to_the_wish_from_before(
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
    now = [replica(index, 0, serves=serving or index > 0) for index in range(count)]
    tried: TrialStatus | None = None
    wanted, new, starts, finished = NEW, True, 0, False
    for _ in range(20 * count + 20):
        step = next_step(wanted, new, now, tried)
        away = sum(not one.serves or one.is_unrouted for one in now)
        assert away <= 1 or not serving
        match step:
            case TryBeside(index):
                fails = starts == fails_at and room and new
                starts += room
                tried = TrialStatus(
                    index, wanted, "failed" if fails else "ready" if room else "no_room", "why"
                )
            case Adopt():
                assert tried is not None
                now[tried.index] = replica(tried.index, wanted)
                tried = None
            case EndTrial():
                tried = None
            case GoInPlace(index):
                now[index], tried = (
                    replica(
                        index,
                        now[index].generation,
                        serves=now[index].serves,
                        must_be_replaced=True,
                    ),
                    None,
                )
            case StopRouting(index):
                now[index] = replica(
                    index, now[index].generation, must_be_replaced=True, is_unrouted=True
                )
            case Replace(index):
                fails = starts == fails_at and new
                starts += 1
                now[index] = replica(index, wanted, serves=not fails, failed="why" if fails else "")
            case GiveUp():
                wanted, new, tried = 0, False, None
            case Finish():
                finished = True
                break
            case None:
                break
    assert all(one.generation == wanted and one.serves for one in now)
    assert finished == new


def test_a_change_that_the_engine_does_not_see_starts_nothing_anew() -> None:
    assert not may_need_restart(wish(), wish(policy={"wait_s": 5}, check=False))
    assert may_need_restart(wish(), wish(policy={"allow_remote_code": True}))
    assert may_need_restart(wish(), wish(max_context=5))


def test_the_same_on_other_gpus_is_the_same_start() -> None:
    one = plan()
    assert starts_same_engine(one.evolve(gpus=("GPU-x",) * len(one.gpus)), one)
    assert not starts_same_engine(one.evolve(gpus=(*one.gpus, "GPU-x")), one)
    assert not starts_same_engine(one.evolve(argv=(*one.argv, "--x")), one)


def test_a_wish_that_leaves_the_plan_says_why() -> None:
    one = plan()
    text = f"max model len stays {one.max_model_len.value}: {one.max_model_len.reason}"
    assert why_no_effect(diff_wishes(wish(), wish(max_context=10**6)), one, one) == text
    assert "follows from engines" in why_no_effect(
        diff_wishes(wish(), wish(engines=["vllm"])), one, one
    )
    # A policy is no part of a plan, and another plan speaks for itself.
    assert not why_no_effect(diff_wishes(wish(), wish(policy={"wait_s": 5})), one, one)
    other_plan = one.evolve(argv=(*one.argv, "--seed=3"))
    assert not why_no_effect(diff_wishes(wish(), wish(max_context=5)), one, other_plan)


def test_a_plan_beside_that_holds_less_is_not_as_good() -> None:
    one = plan()
    assert is_as_good(one, one)
    less = one.memory.evolve(kv_tokens=one.memory.kv_tokens // 2)
    assert not is_as_good(one.evolve(memory=less), one)
    shorter = one.max_model_len.evolve(value=one.max_model_len.value // 2)
    assert not is_as_good(one.evolve(max_model_len=shorter), one)


def test_differences_name_what_is_otherwise_and_no_secret() -> None:
    told = diff_wishes(wish(), wish(env={"NCCL_DEBUG": "INFO"}, max_context=5))
    assert [(one.what, one.old, one.new) for one in told] == [
        ("max_context", None, "5"),
        ("env", None, "NCCL_DEBUG"),
    ]
    one = plan()
    other_plan = one.evolve(argv=(*one.argv, "--seed=3"), env={**one.env, "NCCL_DEBUG": "INFO"})
    assert [
        (diff_plan.what, diff_plan.old, diff_plan.new) for diff_plan in diff_plans(one, other_plan)
    ] == [
        ("--seed", None, "3"),
        ("variable NCCL_DEBUG", None, "set"),
    ]
