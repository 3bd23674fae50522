"""The plans and refusals that stand for many like them on nodes of a cluster. Pure.

Nodes that differ in free memory alone have the same layouts and refusals. A hundred such nodes
would make a decision of many megabytes, which no reader compares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from gateway.domain import Plan, RejectedPlan

# Plans of one layout that a decision keeps, the best ones.
_MAX_PLANS_OF_LAYOUT = 8


def best_of_layouts(best_plans: Sequence[Plan]) -> list[Plan]:
    """The best plans of each layout. best_plans: best first."""
    counts: Counter[Hashable] = Counter()
    kept_plans = []
    for plan in best_plans:
        layout = (
            str(plan.engine),
            plan.quantization.value,
            plan.tensor_parallel.value,
            plan.pipeline_parallel.value,
            plan.data_parallel.value,
            plan.span,
            plan.memory.gpu_bytes,
        )
        counts[layout] += 1
        if counts[layout] <= _MAX_PLANS_OF_LAYOUT:
            kept_plans.append(plan)
    return kept_plans


def distinct_refusals(rejections: Iterable[RejectedPlan]) -> Iterable[RejectedPlan]:
    """One of the refusals that differ in free memory alone: that with the most memory."""
    kept_rejections: dict[Hashable, RejectedPlan] = {}
    for rejection in rejections:
        subject = (
            str(rejection.engine),
            rejection.tensor_parallel,
            rejection.pipeline_parallel,
            rejection.data_parallel,
            rejection.verdict,
            rejection.layer,
            rejection.source,
            rejection.question,
            rejection.memory.gpu_bytes if rejection.memory is not None else rejection.reasons,
        )
        kept_rejection = kept_rejections.setdefault(subject, rejection)
        if _budget_bytes(rejection) > _budget_bytes(kept_rejection):
            kept_rejections[subject] = rejection
    return kept_rejections.values()


def _budget_bytes(rejection: RejectedPlan) -> int:
    return rejection.memory.budget_bytes if rejection.memory is not None else 0
