"""gateway.planner.service.plan_program: what the gateway is told, however long or wrong it was."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from gateway.domain import Decision
from gateway.errors import BadModel
from gateway.planner.service.messages import (
    DECISION_BYTES,
    LENGTH,
    Answer,
    Frames,
    Request,
    Start,
    packed,
)
from gateway.planner.service.plan_program import Decided, Planner, answered
from tests.support.makers import planned

ASKED = Request(b"", b"", b"", b"")


class Played(Planner):
    """Says what it is told to."""

    def __init__(self, play: Callable[[], Decision]) -> None:
        super().__init__(Start((), "/nonexistent", None, None, installed_only=False))
        self._play = play

    def decide(self, request: Request) -> Decided:
        del request
        return Decided(self._play())


def told(play: Callable[[], Decision]) -> tuple[Answer, bytes, bytes]:
    head, *frames = answered(Played(play), ASKED)
    return Answer(*json.loads(head)), Frames(*frames).plan, Frames(*frames).decision


def raising(error: BaseException) -> Callable[[], Decision]:
    def play() -> Decision:
        raise error

    return play


def test_the_best_plan_and_the_whole_decision_are_told() -> None:
    decision = planned()
    answer, plan, whole = told(lambda: decision)
    assert (answer.error, answer.reason) == (None, "")
    assert type(decision.plans[0]).model_validate_json(plan) == decision.plans[0]
    assert Decision.model_validate_json(whole) == decision


def test_a_decision_that_is_longer_than_any_is_an_error_in_its_place() -> None:
    answer, plan, whole = told(lambda: Decision(model="m", hardware="h" * DECISION_BYTES))
    assert answer.error is not None
    assert "over the limit of" in str(answer.error["message"])
    assert (plan, whole) == (b"", b"")


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (BadModel("It is none." + "x" * 10**6, hint="y" * 10**6), "BadModel", "It is none."),
        (MemoryError(), "BadModel", "took more than the 2.00 GiB of memory"),
        (TypeError("a mistake"), "", "TypeError: a mistake"),
    ],
)
def test_every_error_is_told_in_few_words(error: Exception, kind: str, says: str) -> None:
    answer, *_ = told(raising(error))
    assert answer.error is not None
    assert answer.error["class"] == kind
    assert says in str(answer.error["message"])
    assert len(json.dumps(answer)) < 10_000
    assert answer.last or not isinstance(error, MemoryError), (
        "memory that was fragmented is given back"
    )


def test_frames_come_after_their_lengths() -> None:
    assert packed([b"ab", b""]) == LENGTH.pack(2) + b"ab" + LENGTH.pack(0)
