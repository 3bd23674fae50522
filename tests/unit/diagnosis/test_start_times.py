"""The expected time of a start: of the same plan under its conditions, of one like it, or none."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.diagnosis.start_times import expected_start, measured_start
from gateway.domain import MeasuredStart, StartConditions
from tests.support.makers import attempt, plan

PLAN = plan()
WARM = StartConditions(origin="process", is_cache_empty=False)
COLD = StartConditions(origin="process", is_cache_empty=True)
FORK = StartConditions(origin="fork", is_cache_empty=False)
CONTAINER = StartConditions(origin="container", is_cache_empty=False)


def start(seconds: float = 5.0, conditions: StartConditions = WARM, **fields: Any) -> MeasuredStart:
    measured_start_time = measured_start(
        attempt(plan=PLAN, phases={"import": seconds, "load": 2.0}), conditions
    )
    return measured_start_time.evolve(**fields)


def test_the_time_of_a_start_is_the_median_of_starts_by_the_same_plan() -> None:
    past = [start(seconds) for seconds in (90.0, 10.0, 12.0, 11.0, 30.0, 9.0)]
    start_time = expected_start(PLAN, WARM, past)
    assert start_time is not None
    assert start_time.phases == {"import": 11.0, "load": 2.0}, "the oldest start does not count"
    assert (
        start_time.low_s,
        start_time.high_s,
        start_time.starts,
        start_time.grade,
    ) == (11.0, 32.0, 5, "measured")


@pytest.mark.parametrize("conditions", [WARM, COLD, FORK, CONTAINER])
def test_each_kind_of_start_has_its_own_median(conditions: StartConditions) -> None:
    seconds = {WARM: 30.0, COLD: 60.0, FORK: 1.0, CONTAINER: 40.0}
    past = [start(seconds[second], second) for second in seconds for _ in range(6)]
    start_time = expected_start(PLAN, conditions, past)
    assert start_time is not None
    assert (start_time.phases["import"], start_time.grade) == (
        seconds[conditions],
        "measured",
    )


def test_a_start_that_is_no_other_kind_for_sure_is_compared_with_all() -> None:
    start_time = expected_start(PLAN, StartConditions(), [start(1.0, FORK), start(30.0, WARM)])
    assert start_time is not None
    assert (
        start_time.low_s,
        start_time.high_s,
        start_time.grade,
    ) == (3.0, 32.0, "measured")


def test_another_plan_or_another_kind_of_start_gives_an_estimate() -> None:
    for past in (start(fingerprint="another"), start(conditions=FORK), start(conditions=COLD)):
        start_time = expected_start(PLAN, WARM, [past])
        assert start_time is not None
        assert start_time.grade == "estimate"


def test_a_start_without_compiled_code_is_not_expected_from_starts_with_it() -> None:
    assert expected_start(PLAN, COLD, [start(conditions=WARM), start(conditions=FORK)]) is None


@pytest.mark.parametrize("changes", [{"engine": "vllm==0.1.0"}, {"gpus": 8}, {"model": "/else"}])
def test_the_time_is_unknown_without_a_similar_measured_start(changes: dict[str, Any]) -> None:
    assert expected_start(PLAN, WARM, [start(fingerprint="another", **changes)]) is None
    assert expected_start(PLAN, WARM, []) is None
