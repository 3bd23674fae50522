"""The expected seconds of a start, from earlier starts of its model on this machine. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.domain import Attempt, StartTime

# Older starts met other caches.
_STARTS = 5


def expected_start(attempt: Attempt, earlier: Iterable[Attempt]) -> StartTime | None:
    """The median of the last starts by the same plan, else of the same engine on as many GPUs; None
    where no start was measured.

    A start from a prepared process is not told from a spawned one: the last starts decide.
    """
    measured = [one for one in earlier if one.phases and one.id != attempt.id]
    of_plan = [one for one in measured if one.fingerprint == attempt.fingerprint]
    of_engine = [
        one
        for one in measured
        if one.plan.engine == attempt.plan.engine
        and len(one.plan.gpus) == len(attempt.plan.gpus)
        and one.plan.model == attempt.plan.model
    ]
    chosen = (of_plan or of_engine)[-_STARTS:]
    if not chosen:
        return None
    totals = [sum(one.phases.values()) for one in chosen]
    names = dict.fromkeys(name for one in chosen for name in one.phases)
    return StartTime(
        phases={
            name: round(_median([one.phases.get(name, 0.0) for one in chosen]), 1) for name in names
        },
        low_s=round(min(totals), 1),
        high_s=round(max(totals), 1),
        starts=len(chosen),
        grade="measured" if of_plan else "estimate",
    )


def _median(seconds: list[float]) -> float:
    # `statistics` imports random, which no decision may reach.
    low, high = (len(seconds) - 1) // 2, len(seconds) // 2
    ordered = sorted(seconds)
    return (ordered[low] + ordered[high]) / 2
