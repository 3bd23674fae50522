"""A better plan than the running one, by measurements, traffic and expectations. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.domain import Plan, Rival, Wish
from gateway.engines.common.speed.objective import gpu_discount, plan_outcome, score

# Another plan must score this many times higher: smaller differences are within the error of
# expectations.
EXPECTED_GAIN = 1.15
# The same where both were measured.
MEASURED_GAIN = 1.05
# The planner's own value where no context was requested.
_CONTEXT = 32768


def rival(running: Plan, plans: Iterable[Plan], wish: Wish, tokens_needed: int) -> Rival | None:
    """The best plan that should beat the running one; None: no such plan, or no measurement of the
    running one.

    A rival makes nothing worse: it has the same weights, the wanted context, sound kernels, and no
    known weakness. tokens_needed: useful tokens of KV cache.
    """
    if running.speed is None or running.speed.grade == "predicted":
        return None
    sound = [
        plan
        for plan in plans
        if plan.speed is not None
        and plan.fingerprint != running.fingerprint
        and is_no_worse(plan, running, wish)
    ]
    best = max(sound, key=lambda plan: worth(plan, wish, tokens_needed), default=None)
    if best is None or best.speed is None:
        return None
    gain = worth(best, wish, tokens_needed) / worth(running, wish, tokens_needed)
    least = (
        MEASURED_GAIN if running.speed.grade == best.speed.grade == "measured" else EXPECTED_GAIN
    )
    return Rival(speed=running.speed, plan=best, gain=round(gain, 3)) if gain > least else None


def is_no_worse(plan: Plan, running: Plan, wish: Wish) -> bool:
    """Whether a plan has the context, the weights and the soundness of the running one."""
    context = min(running.max_model_len.value, wish.context or _CONTEXT)
    return (
        plan.max_model_len.value >= context
        and (running.quantizes_weights or not plan.quantizes_weights)
        and (running.verdict == "degraded" or plan.verdict == "ok")
        and (bool(running.advice) or not plan.advice)
    )


def worth(plan: Plan, wish: Wish, tokens_needed: int) -> float:
    """The score of a plan by its speed. tokens_needed: useful tokens of KV cache."""
    context, size, count = plan.max_model_len.value, len(plan.gpus), plan.replicas.value
    return score(
        plan_outcome(
            plan.memory, plan.speed, context, size, count, tokens_needed, plan.data_parallel.value
        ),
        wish.goal,
        gpu_discount(wish),
    )
