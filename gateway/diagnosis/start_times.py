"""The expected seconds of a start, from earlier starts on this machine. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.domain import Attempt, MeasuredStart, Plan, StartConditions, StartTime

# Older starts met other caches.
_RECENT_STARTS = 5


def measured_start(attempt: Attempt, conditions: StartConditions) -> MeasuredStart:
    """The record of a start that succeeded."""
    plan = attempt.plan
    return MeasuredStart(
        model=plan.model.source,
        engine=str(plan.engine),
        gpus=len(plan.gpus),
        fingerprint=attempt.fingerprint,
        conditions=conditions,
        phases=attempt.phases,
    )


def expected_start(
    plan: Plan, conditions: StartConditions, earlier_starts: Iterable[MeasuredStart]
) -> StartTime | None:
    """The median of the last starts by the same plan under the same conditions, else of the same
    model and engine on as many GPUs; None: unknown.

    A start without compiled code is never expected from starts that had some: only from its like.
    """
    same_engine = [
        start
        for start in earlier_starts
        if (start.model, start.engine, start.gpus)
        == (plan.model.source, str(plan.engine), len(plan.gpus))
        and not (conditions.is_cache_empty and start.conditions.is_cache_empty is False)
    ]
    same_conditions = [
        start for start in same_engine if _is_agreement(conditions, start.conditions)
    ]
    plan_starts = [start for start in same_conditions if start.fingerprint == plan.fingerprint]
    chosen_starts = (plan_starts or same_conditions or same_engine)[-_RECENT_STARTS:]
    if not chosen_starts:
        return None
    totals = [sum(start.phases.values()) for start in chosen_starts]
    names = dict.fromkeys(name for start in chosen_starts for name in start.phases)
    return StartTime(
        phases={
            name: round(median([start.phases.get(name, 0.0) for start in chosen_starts]), 1)
            for name in names
        },
        low_s=round(min(totals), 1),
        high_s=round(max(totals), 1),
        starts=len(chosen_starts),
        grade="measured" if plan_starts else "estimate",
    )


def _is_agreement(conditions: StartConditions, actual_conditions: StartConditions) -> bool:
    """Whether no known condition differs."""
    pairs = (
        (conditions.origin, actual_conditions.origin),
        (conditions.is_cache_empty, actual_conditions.is_cache_empty),
    )
    return all(a is None or b is None or a == b for a, b in pairs)


def median(seconds: list[float]) -> float:
    """The middle of a list that is not empty."""
    # `statistics` imports random, which no decision may reach.
    low = (len(seconds) - 1) // 2
    high = len(seconds) // 2
    ordered_seconds = sorted(seconds)
    return (ordered_seconds[low] + ordered_seconds[high]) / 2
