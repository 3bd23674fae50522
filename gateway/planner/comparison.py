"""A comparison of the first plan's number of GPUs with the next smaller and larger numbers.
Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.domain import Plan, RejectedPlan
from gateway.domain.units import plural


def gpu_comparison(plans: Sequence[Plan], rejections: Sequence[RejectedPlan]) -> str:
    """The reason for the number of GPUs of the first plan; "": there is no plan on GPUs.

    plans: best first. The first plan is compared with the best plan of the neighbouring numbers,
    and with another layout on as many GPUs. The figures are always its gains over the other plan:
    `4 over 2: +38% alone, +37% with 32 concurrent; 4 over 8: -8% alone, -13% with 32 concurrent`.
    """
    if not plans or not plans[0].gpus:
        return ""
    best_by_count: dict[int, Plan] = {}
    for plan in plans:
        best_by_count.setdefault(gpus_of(plan), plan)
    first = plans[0]
    chosen_count = gpus_of(plans[0])
    fewer = max((count for count in best_by_count if count < chosen_count), default=None)
    larger = min((count for count in best_by_count if count > chosen_count), default=None)
    sentences = []
    if fewer is not None:
        sentences.append(f"{chosen_count} over {fewer}: {gains(first, best_by_count[fewer])}")
    elif refusal_words := _refused_below(chosen_count, first, rejections):
        sentences.append(refusal_words)
    if larger is not None:
        sentences.append(f"{chosen_count} over {larger}: {gains(first, best_by_count[larger])}")
    other_layout = next(
        (
            plan
            for plan in plans
            if gpus_of(plan) == chosen_count and layout_of(plan) != layout_of(first)
        ),
        None,
    )
    if other_layout is not None:
        sentences.append(
            f"{layout_of(first)} over {layout_of(other_layout)}: {gains(first, other_layout)}"
        )
    return "; ".join(sentences) or _plan_figures(first)


def gpu_choice(first: Plan, machine_gpus: int, plans_by_option: Mapping[str, Plan]) -> str:
    """The GPUs that the first plan takes and leaves, and its gains over the plans with fewer and
    more; "": the machine has one GPU or none.

    plans_by_option: the best plan for each value of `--gpus`.
    """
    count = gpus_of(first)
    if machine_gpus < 2 or not count:
        return ""
    spare_gpus = machine_gpus - count
    sentences = [
        f"Takes {count} of {plural(machine_gpus, 'GPU')}"
        + (f" and leaves {spare_gpus}." if spare_gpus > 0 else ".")
    ]
    sentences += [
        f"{count} over {gpus_of(plan)} (`--gpus {value}`): {gains(first, plan)}."
        for value, plan in plans_by_option.items()
        if gpus_of(plan) != count
    ]
    return " ".join(sentences)


def gains(plan: Plan, base: Plan) -> str:
    """The differences of a plan from a base plan: speeds as parts, room and context as numbers."""
    sentences = []
    if plan.speed is not None and base.speed is not None:
        speed = plan.speed
        base_speed = base.speed
        sentences.append(f"{_gain_text(speed.stream.value, base_speed.stream.value)} alone")
        if speed.concurrency > 1:
            at_once = f"with {speed.concurrency:,} concurrent"
            sentences.append(f"{_gain_text(speed.total.value, base_speed.total.value)} {at_once}")
    context = plan.max_model_len.value
    base_context = base.max_model_len.value
    if context != base_context:
        sentences.append(f"{context:,} tokens of context instead of {base_context:,}")
    elif (capacity := _request_capacity(plan)) != (base_capacity := _request_capacity(base)):
        requests = "request" if capacity == "1" else "requests"
        sentences.append(
            f"room for {capacity} {requests} of {context:,} tokens instead of {base_capacity}"
        )
    if plan.drops != base.drops:
        sentences.append(f"without {', '.join(plan.drops)}" if plan.drops else "with all inputs")
    return ", ".join(sentences) or "no difference that is known"


def _gain_text(value: float, base: float) -> str:
    # A sum with 0 has no minus where it is 0.
    return f"{round(value / base - 1, 2) + 0.0:+.0%}" if base else f"{value:,g} tokens/s"


def _request_capacity(plan: Plan) -> str:
    """Whole contexts that fit into all copies together."""
    copies = plan.replicas.value * plan.data_parallel.value
    requests = (plan.memory.full_requests or 0) * copies
    # Three digits of a small number, and no exponent of a large one.
    return f"{requests:,.0f}" if requests >= 100 else f"{requests:.3g}"


def gpus_of(plan: Plan) -> int:
    """The GPUs of all copies together."""
    return len(plan.gpus) * plan.replicas.value


def layout_of(plan: Plan) -> str:
    """`TP=2 PP=2 x2`: ranks of a layer, stages and copies."""
    stages = plan.pipeline_parallel.value
    copies = plan.replicas.value
    layout = f"TP={plan.tensor_parallel.value}" + (f" PP={stages}" if stages > 1 else "")
    groups = plan.data_parallel.value
    layout += f" DP={groups}" if groups > 1 else ""
    layout += f" on {plan.span} nodes" if plan.span > 1 else ""
    return layout + (f" x{copies}" if copies > 1 else "")


def _plan_figures(plan: Plan) -> str:
    speed = plan.speed
    memory = plan.memory
    sentences = []
    if speed is not None:
        sentences.append(f"{speed.stream.value:,g} tokens/s alone")
        sentences.append(f"{speed.total.value:,g} with {speed.concurrency:,} concurrent")
    context = f"{plan.max_model_len.value:,} tokens of context"
    if memory.full_requests:
        count = _request_capacity(plan)
        sentences.append(f"room for {count} request{'' if count == '1' else 's'} of {context}")
    else:
        sentences.append(context)
    if plan.drops:
        sentences.append(f"without {', '.join(plan.drops)}")
    return f"{plural(gpus_of(plan), 'GPU')} as {layout_of(plan)}: {', '.join(sentences)}"


def _refused_below(chosen_count: int, plan: Plan, rejections: Sequence[RejectedPlan]) -> str:
    """The refusal of the next smaller number of GPUs by the engine of the first plan; "": none but
    numbers that the model's shapes forbid."""
    smaller = [
        rejection
        for rejection in rejections
        if str(rejection.engine) == str(plan.engine)
        and rejection.verdict != "illegal_parallelism"
        and rejection.tensor_parallel * rejection.pipeline_parallel < chosen_count
    ]
    if not smaller:
        return ""
    nearest = max(
        smaller, key=lambda rejection: rejection.tensor_parallel * rejection.pipeline_parallel
    )
    count = nearest.tensor_parallel * nearest.pipeline_parallel
    return f"{plural(count, 'GPU')}: {nearest.verdict}, {nearest.reasons[0]}"
