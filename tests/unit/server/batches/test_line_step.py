"""The step after each try of a line."""

from __future__ import annotations

import pytest

from gateway.server.batches.line_step import MAX_TRIES, Step, next_step, pause_s


@pytest.mark.parametrize(
    ("status", "is_json", "step"),
    [
        (200, True, "answer"),
        (200, False, "repeat"),
        (400, True, "error"),
        (404, True, "error"),
        (413, True, "error"),
        (401, True, "wait"),
        (408, True, "wait"),
        (429, True, "wait"),
        (503, True, "wait"),
        (500, True, "repeat"),
        (502, True, "repeat"),
        (None, False, "repeat"),
    ],
)
def test_a_first_try_is_followed_by_a_step(
    status: int | None, step: Step, *, is_json: bool
) -> None:
    assert next_step(status, "", 0, is_json=is_json) == step


@pytest.mark.parametrize("status", [500, 502, None, 200])
def test_a_line_fails_a_few_times_at_most(status: int | None) -> None:
    steps = [next_step(status, "", failures, is_json=False) for failures in range(MAX_TRIES)]
    assert steps == ["repeat"] * (MAX_TRIES - 1) + ["error"]


def test_waiting_has_no_end_of_its_own() -> None:
    assert next_step(503, "", 1000, is_json=True) == "wait"


def test_pauses_grow_and_follow_the_answer() -> None:
    pauses = [pause_s(tries, None) for tries in range(100)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.5, 30)
    assert [pause_s(50, seconds) for seconds in (0, 2, 1e9)] == [0.5, 2, 30]


def test_a_line_that_no_engine_has_seen_waits() -> None:
    assert next_step(502, "engine_unreachable", 1000, is_json=True) == "wait"
    assert next_step(507, "store_error", 1000, is_json=True) == "wait"
    assert next_step(502, "engine_error", 1000, is_json=True) == "error"
