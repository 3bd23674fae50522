"""gateway.planner.service.plan_program: answers to the gateway, however long or wrong."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from gateway.domain import Decision, Plan
from gateway.domain.plan_request import PlanRequest, PlanResult
from gateway.errors import BadModel
from gateway.planner.service.messages import (
    DECISION_BYTES,
    LENGTH,
    PlanAnswer,
    WorkerConfig,
    pack,
    read_result,
)
from gateway.planner.service.plan_program import PlanWorker, _checked_size, answer_frames
from tests.support.makers import make_decision, wish


class ScriptedWorker(PlanWorker):
    """Has the decision of a script."""

    def __init__(self, script: Callable[[], Decision]) -> None:
        super().__init__(WorkerConfig((), "/nonexistent", None, None, installed_only=False))
        self._script = script

    def plan(self, request: PlanRequest, facts: bytes) -> PlanResult:
        del request, facts
        decision = self._script()
        best = decision.plans[0] if decision.plans else None
        return PlanResult(best, "", _checked_size(decision))


def run_program(script: Callable[[], Decision]) -> tuple[PlanAnswer, Plan | None, bytes]:
    head, *frames = answer_frames(ScriptedWorker(script), PlanRequest(wish()), b"")
    result = read_result(frames)
    return PlanAnswer(*json.loads(head)), result.plan, result.decision


def failing_decision(error: BaseException) -> Callable[[], Decision]:
    def play() -> Decision:
        raise error

    return play


def test_the_best_plan_and_the_whole_decision_are_reported() -> None:
    decision = make_decision()
    answer, plan, whole = run_program(lambda: decision)
    assert answer.error is None
    assert plan == decision.plans[0]
    assert Decision.model_validate_json(whole) == decision


def test_a_decision_that_is_longer_than_any_is_an_error_in_its_place() -> None:
    answer, plan, whole = run_program(lambda: Decision(model="m", hardware="h" * DECISION_BYTES))
    assert answer.error is not None
    assert "over the limit of" in str(answer.error["message"])
    assert (plan, whole) == (None, b"null")


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (BadModel("It is none." + "x" * 10**6, hint="y" * 10**6), "BadModel", "It is none."),
        (MemoryError(), "BadModel", "took more than the 2.00 GiB of memory"),
        (TypeError("a mistake"), "", "TypeError: a mistake"),
    ],
)
def test_every_error_of_the_plan_program_is_short(error: Exception, kind: str, says: str) -> None:
    answer, *_ = run_program(failing_decision(error))
    assert answer.error is not None
    assert answer.error["class"] == kind
    assert says in str(answer.error["message"])
    assert len(json.dumps(answer)) < 10_000
    assert answer.last or not isinstance(error, MemoryError), (
        "memory that was fragmented is given back"
    )


def test_frames_come_after_their_lengths() -> None:
    assert pack([b"ab", b""]) == LENGTH.pack(2) + b"ab" + LENGTH.pack(0)
