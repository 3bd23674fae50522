"""Gains after a second measurement of the served plan."""

from __future__ import annotations

import pytest

from gateway.domain import Speed
from gateway.engines.common.speed.correction import estimate
from gateway.measuring.tuning.plan_figures import rebase
from gateway.measuring.tuning.tuning_report import TriedPlan, TuningReport
from tests.support.makers import wish

SPEED = Speed(
    stream=estimate(20.0, 0.05),
    total=estimate(20.0, 0.05),
    concurrency=1,
    first_token_2k_s=estimate(0.1, 0.05),
    grade="measured",
    source="fitserve tune",
)


@pytest.mark.parametrize(
    ("ratio", "best", "worths"),
    [(1.1, 2, [1.0, None, 1.091]), (1.15, 0, [1.0, None, 1.043]), (2.0, 0, [1.0, None, 0.6])],
)
def test_a_gain_that_a_second_measurement_takes_back_is_not_proposed(
    ratio: float, best: int, worths: list[float | None]
) -> None:
    trials = (
        TriedPlan(change="the served plan", relative_score=1.0),
        TriedPlan(change="it ended", problem="no memory"),
        TriedPlan(change="4,096 tokens in a batch", relative_score=1.2),
    )
    report = TuningReport(
        model="m", state="running", seconds=900.0, tried=trials, best=2, wish=wish()
    )
    new = rebase(report, SPEED, ratio)
    assert [trial.relative_score for trial in new.tried] == worths
    assert new.tried[0].speed == SPEED
    assert (new.best, new.wish is not None) == (best, best == 2)
