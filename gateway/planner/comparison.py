"""The first plan's number of GPUs beside the neighbouring numbers, in figures. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.domain import Plan, Rejected
from gateway.domain.units import plural


def gpu_comparison(plans: Sequence[Plan], rejected: Sequence[Rejected]) -> str:
    """The reason for the number of GPUs of the first plan; "": there is no plan on GPUs.

    plans: best first. Each number of GPUs is told by its best plan, and the first plan's number by
    another layout too.
    """
    if not plans or not plans[0].gpus:
        return ""
    best: dict[int, Plan] = {}
    for plan in plans:
        best.setdefault(gpus_of(plan), plan)
    chosen = gpus_of(plans[0])
    other_plan = next(
        (
            plan
            for plan in plans
            if gpus_of(plan) == chosen and layout_of(plan) != layout_of(plans[0])
        ),
        None,
    )
    figures = [_figures(plan) for plan in (plans[0], other_plan) if plan is not None]
    fewer = max((count for count in best if count < chosen), default=None)
    larger = min((count for count in best if count > chosen), default=None)
    figures += [_figures(best[count]) for count in (fewer, larger) if count]
    if fewer is None and (refused := _refused_below(chosen, plans[0], rejected)):
        figures.append(refused)
    return "; ".join(figures)


def gpus_of(plan: Plan) -> int:
    """The GPUs of all copies together."""
    return len(plan.gpus) * plan.replicas.value


def layout_of(plan: Plan) -> str:
    """`TP=2 PP=2 x2`: ranks of a layer, stages and copies."""
    stages, copies = plan.pipeline_parallel.value, plan.replicas.value
    layout = f"TP={plan.tensor_parallel.value}" + (f" PP={stages}" if stages > 1 else "")
    groups = plan.data_parallel.value
    layout += f" DP={groups}" if groups > 1 else ""
    layout += f" on {plan.span} nodes" if plan.span > 1 else ""
    return layout + (f" x{copies}" if copies > 1 else "")


def _figures(plan: Plan) -> str:
    speed, memory = plan.speed, plan.memory
    parts = []
    if speed is not None:
        parts.append(f"{speed.stream.value:,g} tokens/s alone")
        parts.append(f"{speed.total.value:,g} with {speed.concurrency:,} at once")
    context = f"{plan.max_model_len.value:,} tokens of context"
    if memory.full_requests:
        full_requests = memory.full_requests * plan.replicas.value * plan.data_parallel.value
        count = f"{full_requests:,.3g}"
        parts.append(f"room for {count} request{'' if count == '1' else 's'} of {context}")
    else:
        parts.append(context)
    if plan.drops:
        parts.append(f"without {', '.join(plan.drops)}")
    return f"{plural(gpus_of(plan), 'GPU')} as {layout_of(plan)}: {', '.join(parts)}"


def _refused_below(chosen: int, plan: Plan, rejected: Sequence[Rejected]) -> str:
    """The refusal of the next smaller number of GPUs by the engine of the first plan; "": none."""
    smaller = [
        rejection
        for rejection in rejected
        if str(rejection.engine) == str(plan.engine)
        and rejection.tensor_parallel * rejection.pipeline_parallel < chosen
    ]
    if not smaller:
        return ""
    nearest = max(
        smaller, key=lambda rejection: rejection.tensor_parallel * rejection.pipeline_parallel
    )
    count = nearest.tensor_parallel * nearest.pipeline_parallel
    return f"{plural(count, 'GPU')}: {nearest.verdict}, {nearest.reasons[0]}"
