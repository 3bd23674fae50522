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


def rival(
    running_plan: Plan, plans: Iterable[Plan], wish: Wish, tokens_needed: int
) -> Rival | None:
    """The best plan that should beat the running one; None: no such plan, or no measurement of the
    running one.

    A rival makes nothing worse: it has the same weights, the wanted context, sound kernels, and no
    known weakness. tokens_needed: useful tokens of KV cache.
    """
    if running_plan.speed is None or running_plan.speed.grade == "predicted":
        return None
    sound_plans = [
        plan
        for plan in plans
        if plan.speed is not None
        and plan.fingerprint != running_plan.fingerprint
        and is_no_worse(plan, running_plan, wish)
    ]
    best_plan = max(sound_plans, key=lambda plan: worth(plan, wish, tokens_needed), default=None)
    if best_plan is None or best_plan.speed is None:
        return None
    gain = worth(best_plan, wish, tokens_needed) / worth(running_plan, wish, tokens_needed)
    needed_gain = (
        MEASURED_GAIN
        if running_plan.speed.grade == best_plan.speed.grade == "measured"
        else EXPECTED_GAIN
    )
    return (
        Rival(speed=running_plan.speed, plan=best_plan, gain=round(gain, 3))
        if gain > needed_gain
        else None
    )


def is_no_worse(plan: Plan, running_plan: Plan, wish: Wish) -> bool:
    """Whether a plan has the context, the weights and the soundness of the running one."""
    context = min(running_plan.max_model_len.value, wish.context or _CONTEXT)
    return (
        plan.max_model_len.value >= context
        and (running_plan.quantizes_weights or not plan.quantizes_weights)
        and (running_plan.verdict == "degraded" or plan.verdict == "ok")
        and (bool(running_plan.advice) or not plan.advice)
    )


def worth(plan: Plan, wish: Wish, tokens_needed: int) -> float:
    """The score of a plan by its speed. tokens_needed: useful tokens of KV cache."""
    context = plan.max_model_len.value
    size = len(plan.gpus)
    count = plan.replicas.value
    return score(
        plan_outcome(
            memory=plan.memory,
            speed=plan.speed,
            context=context,
            gpus=size,
            count=count,
            tokens_needed=tokens_needed,
            groups=plan.data_parallel.value,
        ),
        wish.goal,
        gpu_discount(wish),
    )
