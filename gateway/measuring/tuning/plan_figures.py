"""The measured figures of a tried plan, and their worth for the goal of a wish. Pure."""

from __future__ import annotations

from gateway.domain import BenchReport, Plan, Speed, Wish
from gateway.engines.common.speed.correction import estimate
from gateway.engines.common.speed.objective import LONG_REQUESTS_MAX, concurrency
from gateway.engines.common.speed.rival import MEASURED_GAIN, worth
from gateway.measuring.tuning.tuning_report import TuningReport
from gateway.planner.sizes import COMFORTABLE_CONTEXT

# Two runs of one plan differ by less.
_BAND = 0.05


def measured_speed(plan: Plan, report: BenchReport) -> Speed:
    """The speed of all copies of the plan, from a report of one copy."""
    last_level = report.levels[-1]
    copies = plan.replicas.value
    first = report.first_token_32k_s
    return Speed(
        stream=estimate(report.stream or last_level.tokens_per_s, _BAND),
        total=estimate(last_level.tokens_per_s * copies, _BAND),
        concurrency=last_level.concurrency * copies,
        first_token_2k_s=estimate(report.first_token_2k_s or 0.0, _BAND),
        first_token_32k_s=estimate(first, _BAND) if first is not None else None,
        grade="measured",
        source="fitserve tune",
    )


def score_plan(plan: Plan, speed: Speed | None, wish: Wish) -> float:
    """The worth of a plan with this speed; of two plans for a wish the larger is better."""
    context = min(plan.max_model_len.value, wish.context or wish.min_context or COMFORTABLE_CONTEXT)
    return worth(
        plan.evolve(speed=speed), wish, context * min(LONG_REQUESTS_MAX, concurrency(wish))
    )


def rebase(report: TuningReport, speed: Speed, ratio: float) -> TuningReport:
    """The report after a second measurement of the served plan, `ratio` times as good as the first.

    The worth of each plan is relative to the served one. A gain below the noise proposes nothing.
    """
    served_plan, *trials = report.tried
    tried_plans = (
        served_plan.evolve(speed=speed),
        *(
            trial.evolve(relative_score=round(trial.relative_score / ratio, 3))
            if trial.relative_score is not None
            else trial
            for trial in trials
        ),
    )
    is_better = (tried_plans[report.best].relative_score or 0.0) >= MEASURED_GAIN
    best_index, wish = (report.best, report.wish) if is_better else (0, None)
    return report.evolve(tried=tried_plans, best=best_index, wish=wish)
