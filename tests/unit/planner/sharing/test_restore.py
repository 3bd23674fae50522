"""The plan that a copy has again after an end from outside, and the cases in which it is planned
anew."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import Attempt, Cap, Decision, Failure, LayerAttention, LayerKernel, Plan
from gateway.planner.sharing.restore import (
    interrupted_plan,
    plan_to_restore,
    restore_decision,
    wish_for_restore,
)
from tests.support.makers import GIB, plan, wish

SERVED = plan("3090", max_context=8192)
CUT = Failure(kind="exited", phase="serving", message="", proven_subject="nothing")


def ended_attempt(planned: Plan, failure: Failure | None, *, ready: bool) -> Attempt:
    fields_of_attempt: dict[str, Any] = {
        "id": 1,
        "model": "m",
        "replica": 0,
        "port": 1,
        "started_at": 1.0,
        "fingerprint": "f",
    }
    state = "failed" if failure else "stopped"
    return Attempt.model_validate(
        {
            **fields_of_attempt,
            "plan": planned,
            "state": state,
            "ready_at": 2.0 if ready else None,
            "failure": failure,
        }
    )


def test_starts_that_were_cut_off_too_change_nothing() -> None:
    cut = [ended_attempt(SERVED, CUT, ready=True)]
    assert interrupted_plan(cut) is SERVED
    other_plan = plan("3090", max_context=4096)
    assert (
        interrupted_plan([*cut, ended_attempt(other_plan, CUT.evolve(kind="killed"), ready=False)])
        is SERVED
    )
    assert interrupted_plan([*cut, ended_attempt(other_plan, CUT, ready=True)]) is other_plan


@pytest.mark.parametrize("kind", ["withdrawn", "host_error", "download", "stalled"])
def test_an_obstructed_start_is_planned_again(kind: str) -> None:
    assert (
        interrupted_plan(
            [
                ended_attempt(SERVED, CUT, ready=True),
                ended_attempt(SERVED, CUT.evolve(kind=kind), ready=False),
            ]
        )
        is None
    )


def test_a_model_that_stopped_or_failed_by_itself_is_planned_again() -> None:
    assert interrupted_plan([]) is None
    assert interrupted_plan([ended_attempt(SERVED, None, ready=True)]) is None
    assert (
        interrupted_plan([ended_attempt(SERVED, CUT.evolve(proven_subject="plan"), ready=True)])
        is None
    )


def test_a_capped_plan_takes_free_memory_once_the_others_are_gone() -> None:
    capped_plan = SERVED.evolve(cap=Cap(bytes=8 * GIB, models=("other",)))
    assert plan_to_restore(SERVED, None) is SERVED
    assert plan_to_restore(capped_plan, Cap(bytes=8 * GIB, models=("other",))) is capped_plan
    assert plan_to_restore(capped_plan, None) is None


def test_a_plan_in_another_place_or_with_more_memory_is_not_the_same() -> None:
    restored_wish = wish_for_restore(wish(gpus="few"), SERVED)
    assert (
        restored_wish.gpus,
        restored_wish.engines,
        restored_wish.replicas,
    ) == (SERVED.gpus, (str(SERVED.engine),), 1)
    decision = make_decision(SERVED)
    restored_decision = restore_decision(decision, SERVED)
    assert restored_decision is not None
    assert restored_decision.plans[0] == SERVED
    assert restore_decision(make_decision(SERVED.evolve(gpus=("GPU-other",))), SERVED) is None
    more = SERVED.memory.evolve(budget_bytes=SERVED.memory.budget_bytes + 1)
    assert restore_decision(make_decision(SERVED.evolve(memory=more)), SERVED) is None
    assert restore_decision(decision.evolve(plans=()), SERVED) is None


def test_another_way_is_not_the_same_and_other_sizes_are() -> None:
    """A drafter that failed in a plan of another size is not known to fail in one of this size."""
    shorter = SERVED.evolve(
        max_model_len=SERVED.max_model_len.evolve(value=SERVED.max_model_len.value - 16)
    )
    restored_decision = restore_decision(make_decision(shorter), SERVED)
    assert restored_decision is not None
    assert restored_decision.plans[0] == shorter
    for other_plan in (
        SERVED.evolve(speculation=SERVED.speculation.evolve(value="eagle3")),
        SERVED.evolve(
            enforce_eager=SERVED.enforce_eager.evolve(value=not SERVED.enforce_eager.value)
        ),
        SERVED.evolve(
            attention=(
                LayerAttention(
                    kind="full", layers=32, head_dim=128, backend="TRITON_ATTN", status="ok"
                ),
            )
        ),
        SERVED.evolve(
            kernels=(
                LayerKernel(
                    layer="qkv_proj", count=32, k=64, n=64, scheme="awq", kernel="awq", status="ok"
                ),
            )
        ),
    ):
        assert other_plan != SERVED
        assert restore_decision(make_decision(other_plan), SERVED) is None


def make_decision(planned: Plan) -> Decision:
    return Decision(model="m", hardware="3090", plans=(planned,))
