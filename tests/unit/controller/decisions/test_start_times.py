"""The expected time of a start: of the same plan, else of one like it, else unknown."""

from __future__ import annotations

from gateway.controller.decisions.start_times import expected_start
from tests.support.makers import attempt

NOW = attempt(9)


def test_the_time_of_a_start_is_the_median_of_starts_by_the_same_plan() -> None:
    past = [
        attempt(number, phases={"import": seconds, "load": 2.0})
        for number, seconds in enumerate((90.0, 10.0, 12.0, 11.0, 30.0, 9.0), 1)
    ]
    found = expected_start(NOW, past)
    assert found is not None
    assert found.phases == {"import": 11.0, "load": 2.0}, "the oldest start does not count"
    assert (found.low_s, found.high_s, found.starts, found.grade) == (11.0, 32.0, 5, "measured")


def test_another_plan_of_the_model_gives_an_estimate() -> None:
    found = expected_start(NOW, [attempt(1, fingerprint="another", phases={"import": 5.0})])
    assert found is not None
    assert found.grade == "estimate"


def test_without_a_measured_start_alike_the_time_is_unknown() -> None:
    plan = NOW.plan.evolve(engine=NOW.plan.engine.evolve(version="0.1.0"))
    other = attempt(1, fingerprint="another", plan=plan, phases={"import": 5.0})
    assert expected_start(NOW, [attempt(2), other]) is None
    assert expected_start(NOW, [NOW.evolve(phases={"import": 5.0})]) is None
