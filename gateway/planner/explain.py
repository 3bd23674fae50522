"""Plans and decisions as words and rows; the CLI only paints them. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from gateway.diagnosis.facts.peers import P2P_SWITCH
from gateway.domain import (
    Choice,
    Decision,
    EngineRef,
    Estimate,
    ExpectedStart,
    Gpu,
    Hardware,
    Memory,
    Plan,
    RejectedPlan,
    Rival,
    Speed,
)
from gateway.domain.phases import phase_label
from gateway.domain.start import StartOrigin
from gateway.domain.units import GIB, gib, plural
from gateway.domain.wish import Goal
from gateway.planner.comparison import gpus_of, layout_of
from gateway.planner.layer_tables import rejection_lines
from gateway.planner.proposal.default_choices import is_default


class Row(NamedTuple):
    name: str
    value: str
    reason: str
    source: str


class ChoiceRow(NamedTuple):
    """A decided value in words. is_default: the engine's own value, for the usual reason."""

    name: str
    value: str
    reason: str
    is_default: bool = False


def choices(plan: Plan, why_gpus: str = "", origin: StartOrigin | None = None) -> list[ChoiceRow]:
    """Every decided value, with its reason and source.

    why_gpus: the decision's reason for its GPUs.
    origin: the source of the images or files that its starts use; None: unknown.
    """
    rows = [
        ChoiceRow(
            "engine",
            str(plan.engine),
            image_text(plan.engine) if origin in (None, "container") else _ORIGINS[origin],
        )
    ]
    rows += [ChoiceRow("GPUs", str(gpus_of(plan)), why_gpus)] if why_gpus else []
    for name in Plan.model_fields:
        choice = getattr(plan, name)
        if isinstance(choice, Choice) and not (
            name == "num_speculative_tokens" and not choice.value
        ):
            value = (
                {True: "on", False: "off"}[choice.value]
                if isinstance(choice.value, bool)
                else str(choice.value)
            )
            reason = f"{choice.reason} ({choice.source})"
            row = ChoiceRow(name.replace("_", " "), value, reason, is_default(name, choice))
            rows.append(row)
    return rows + [
        ChoiceRow(name, choice.value, f"{choice.reason} ({choice.source})")
        for name, choice in plan.variables.items()
    ]


def image_text(engine: EngineRef) -> str:
    """The name of its image, and the digest."""
    return ", ".join(
        [
            *([f"image {engine.image}"] if engine.image else []),
            *([short_digest(engine.digest)] if engine.digest else []),
        ]
    )


def short_digest(digest: str) -> str:
    """The part of a digest that Docker shows."""
    _, mark, digits = digest.partition("sha256:")
    return mark + digits[:12]


def memory_rows(memory: Memory) -> list[tuple[str, str, str]]:
    """The parts of a device's memory, in the order of the bar, with the letters of the bar. The
    last `BUDGET_ROWS` rows are not parts, but limits."""
    rows = [("W weights", gib(memory.weights_bytes), "")]
    for letter, name in (("a", "activations"), ("g", "graphs"), ("o", "overhead")):
        part_bytes = getattr(memory, _PARTS[letter])
        rows += [(f"{letter} {name}", gib(part_bytes), "estimate")] if part_bytes else []
    tokens = f"{memory.kv_tokens:,} tokens of {memory.kv_bytes_per_token:,} bytes"
    requests = (
        f": {memory.full_requests:,.10g} times the planned context" if memory.full_requests else ""
    )
    rows.append(("K KV cache", gib(memory.kv_bytes), tokens + requests))
    rows.append(("budget", gib(memory.budget_bytes), "what the engine may take"))
    rows.append(
        (
            "without K",
            f"{memory.low / GIB:.2f} to {gib(memory.high)}",
            "everything but the KV cache, least to most",
        )
    )
    return rows


BUDGET_ROWS = 2

# The field of each letter of the memory bar.
_PARTS = {
    "W": "weights_bytes",
    "a": "activation_bytes",
    "g": "graph_bytes",
    "o": "overhead_bytes",
    "K": "kv_bytes",
}


def memory_bar(memory: Memory, width: int = 60) -> str:
    """The memory of a device as a bar; dots are free or foreign. Tiny parts are left out."""
    bar = ""
    filled_columns = 0
    for letter, name in _PARTS.items():
        filled_columns += getattr(memory, name)
        bar = bar.ljust(
            min(width, round(width * filled_columns / max(1, memory.gpu_bytes))), letter
        )
    return f"[{bar.ljust(width, '.')}] {gib(memory.gpu_bytes)}"


def speed_rows(speed: Speed) -> list[tuple[str, str]]:
    """The expected speed of the plan: each figure with its name and band."""
    rows = [
        ("one request", f"{_estimate_text(speed.stream)} tokens/s"),
        (f"{speed.concurrency:,} concurrent", f"{_estimate_text(speed.total)} tokens/s in all"),
        ("first token, 2k", f"{_estimate_text(speed.first_token_2k_s)} s"),
    ]
    long_estimate = speed.first_token_32k_s
    return (
        [*rows, ("first token, 32k", f"{_estimate_text(long_estimate)} s")]
        if long_estimate
        else rows
    )


def rejected_counts(rejections: Sequence[RejectedPlan]) -> str:
    """`illegal_parallelism 16, text_only 2`: rejected candidates by verdict, most first."""
    counts = Counter(rejection.verdict for rejection in rejections)
    return ", ".join(f"{verdict} {count}" for verdict, count in counts.most_common())


def start_rows(start: ExpectedStart) -> list[tuple[str, str]]:
    """The phases of a plan's start with their seconds, and their source."""
    time = start.time
    conditions = start.conditions
    origin = _ORIGINS.get(conditions.origin or "", "")
    empty = "nothing is compiled yet" if conditions.is_cache_empty else ""
    group_columns = [origin, empty]
    if time is None:
        return [("by", ", ".join(filter(None, ["no start like it was measured", *group_columns])))]
    basis = {
        "measured": (
            "the last start of this plan here"
            if time.starts == 1
            else f"the last {time.starts} starts of this plan here"
        ),
        "estimate": f"{time.starts} other starts of this model here",
        "elsewhere": (
            f"{time.starts} starts of other models on another machine (H200), without reading"
            " weights"
        ),
    }
    rows = [(phase_label(name), f"{seconds:,g} s") for name, seconds in time.phases.items()]
    band = f"{time.low_s:,g} s" + (f" to {time.high_s:,g} s" if time.high_s != time.low_s else "")
    group_columns = [basis[time.grade], *group_columns]
    return [*rows, ("in all", band), ("by", ", ".join(filter(None, group_columns)))]


_ORIGINS = {
    "container": "in a container",
    "process": "by a new process",
    "fork": "by a fork of the prepared process",
}


def missing_speed_advice(plan: Plan) -> str:
    """The advice if nothing is known of the GPUs; "": no speed is expected."""
    if plan.speed is not None or not plan.gpus or plan.model.task != "generate":
        return ""
    return (
        "Expected speed: unknown, for no data sheet of these GPUs is known here. `fitserve"
        " calibrate` measures them."
    )


def rival_words(rival: Rival) -> str:
    """The comparison of the running plan with a better one, in numbers."""
    served_speed = rival.speed
    rival_speed = rival.plan.speed
    plan = rival.plan
    if rival_speed is None:
        return ""
    extra = f" ({changes(plan)})" if changes(plan) else ""
    return (
        f"It gives {served_speed.stream.value:,g} tokens/s alone and {served_speed.total.value:,g} "
        f"with {served_speed.concurrency} concurrent requests ({served_speed.grade}). "
        f"{plan.engine} with {layout_of(plan)}{extra} should give {rival_speed.stream.value:,g} "
        f"and {rival_speed.total.value:,g} with {rival_speed.concurrency} ({rival_speed.grade}): "
        f"{rival.gain:.2f} times as good for what the model is for."
    )


def _estimate_text(number: Estimate) -> str:
    return f"{number.value:,g} ({number.low:,g} to {number.high:,g})"


class RefusedGroup(NamedTuple):
    """Candidates refused for one reason: `vllm==0.19.1 TP=2,4`, the verdict, lines of reasons."""

    candidates: str
    verdict: str
    lines: list[str]


def rejections(rejections: tuple[RejectedPlan, ...]) -> list[RefusedGroup]:
    """The refusals, grouped by reason. Numbers of GPUs that no layout divides by are one group."""
    grouped: dict[tuple[str, tuple[str, ...]], dict[EngineRef, list[str]]] = {}
    counts: dict[tuple[str, ...], list[int]] = {}
    for rejection in rejections:
        lines = _reasons(rejection)
        if rejection.verdict == "illegal_parallelism":
            lines = tuple(_drop_count(line, rejection.tensor_parallel) for line in lines)
            sizes_refused = counts.setdefault(lines, [])
            if rejection.tensor_parallel not in sizes_refused:
                sizes_refused.append(rejection.tensor_parallel)
        stages = f" PP={rejection.pipeline_parallel}" if rejection.pipeline_parallel > 1 else ""
        groups = f" DP={rejection.data_parallel}" if rejection.data_parallel > 1 else ""
        sizes = grouped.setdefault((rejection.verdict, lines), {}).setdefault(rejection.engine, [])
        size = f"{rejection.tensor_parallel}{stages}{groups}"
        sizes += [] if size in sizes else [size]
    has_one_rank = all(sizes == ["1"] for engines in grouped.values() for sizes in engines.values())
    return [
        RefusedGroup(
            _candidates(engines, has_one_rank=has_one_rank),
            verdict,
            [line.replace(_COUNT, _count_words(counts.get(lines, []))) for line in lines],
        )
        for (verdict, lines), engines in grouped.items()
    ]


# Stands for a number of GPUs in the reason of a refusal.
_COUNT = "\0"


def _drop_count(line: str, count: int) -> str:
    return re.sub(rf"\b{count}(?= GPUs?\b)", _COUNT, line)


def _count_words(counts: list[int]) -> str:
    *head, last = map(str, counts or [0])
    return f"{', '.join(head)} or {last}" if head else last


def _candidates(engines: dict[EngineRef, list[str]], *, has_one_rank: bool) -> str:
    """`vllm==0.33.0, 0.26.0; sglang==0.5.23 TP=2,4`: engine versions with the same sizes.

    has_one_rank: every candidate of the machine has one rank, so no sizes are named.
    """
    kinds_by_sizes: dict[str, dict[str, list[str]]] = {}
    for engine, sizes in engines.items():
        kinds = kinds_by_sizes.setdefault(",".join(sizes), {})
        kinds.setdefault(engine.kind, []).append(engine.version)
    return "; ".join(
        "; ".join(f"{kind}=={', '.join(versions)}" for kind, versions in kinds.items())
        + ("" if has_one_rank else f" TP={sizes}")
        for sizes, kinds in kinds_by_sizes.items()
    )


def _reasons(rejection: RejectedPlan) -> tuple[str, ...]:
    """The reasons; a line for each kernel or backend if all of them refuse."""
    reasons = rejection_lines(rejection)
    if not reasons:
        # A profile's rules are the engine version's own, which is named anyway.
        source = "" if rejection.source.startswith("profile ") else f" ({rejection.source})"
        return (*rejection.reasons[:-1], rejection.reasons[-1] + source)
    return (rejection.reasons[0].partition(": ")[0] + ":", *(f"  {line}" for line in reasons))


def shapes(plans: tuple[Plan, ...]) -> list[tuple[str, ...]]:
    """The plans by number of GPUs and layout: rank, GPUs, layout, context, tokens/s, engines.

    The figures are of the best plan of a shape. tokens/s: the speed of a single request, and of
    many concurrent ones. Engine versions stand in the order of their ranks, with the changes of
    their plans.
    """
    grouped: dict[tuple[int, str], list[Plan]] = {}
    for plan in plans:
        grouped.setdefault((gpus_of(plan), layout_of(plan)), []).append(plan)
    return [
        (
            str(group[0].rank),
            str(count or "CPU"),
            layout,
            f"{group[0].max_model_len.value:,}",
            f"{group[0].speed.stream.value:,g}" if group[0].speed else "?",
            f"{group[0].speed.total.value:,g}" if group[0].speed else "?",
            _engines(group),
        )
        for (count, layout), group in grouped.items()
    ]


def _engines(plans: list[Plan]) -> str:
    """The engine versions of these plans, each by its best plan: `vllm==0.33.0, 0.26.0`."""
    best_by_engine: dict[str, Plan] = {}
    for plan in plans:
        best_by_engine.setdefault(str(plan.engine), plan)
    notes: dict[tuple[str, str], list[str]] = {}
    for plan in best_by_engine.values():
        note = changes(plan) + (" (degraded)" if plan.verdict == "degraded" else "")
        notes.setdefault((plan.engine.kind, note.strip()), []).append(plan.engine.version)
    return "; ".join(
        f"{kind}=={', '.join(versions)}" + (f": {note}" if note else "")
        for (kind, note), versions in notes.items()
    )


def changes(plan: Plan) -> str:
    """The differences of a plan from the defaults of its engine."""
    texts = []
    if plan.cost:
        texts += ["whole experts"] if plan.expert_parallel.value else []
        texts += (
            [f"KV cache in {plan.kv_cache_dtype.value}"]
            if plan.kv_cache_dtype.value != "auto"
            else []
        )
        texts += [plan.kernel_overrides.value] if plan.kernel_overrides.value != "none" else []
        texts += (
            [f"{plan.dtype.value} activations"] if plan.dtype.source.startswith("profile") else []
        )
        texts += [f"weights in {plan.quantization.value}"] if plan.quantizes_weights else []
        texts += ["no graphs, small batch"] if plan.enforce_eager.source == "fact" else []
    texts += [f"without {', '.join(plan.drops)}"] if plan.drops else []
    texts += ["no custom all-reduce"] if plan.custom_all_reduce.source == "fact" else []
    texts += ["no peer-to-peer access"] if plan.env.get(P2P_SWITCH[0]) == P2P_SWITCH[1] else []
    return ", ".join(texts)


def headline(decision: Decision) -> str:
    if not decision.plans:
        return f"No plan for {decision.model} on {decision.hardware}."
    best_plan = decision.plans[0]
    count = len(best_plan.gpus)
    copies = best_plan.replicas.value
    device_words = f"{plural(count, 'GPU')}{' each' if copies > 1 else ''}" if count else "the CPU"
    engine = f"{copies} copies of {best_plan.engine}" if copies > 1 else str(best_plan.engine)
    context = f"{best_plan.max_model_len.value:,} tokens of context"
    grade_words = ", ".join(word for word in (best_plan.grade, best_plan.verdict) if word != "ok")
    drop_words = f"Without {', '.join(best_plan.drops)}: " if best_plan.drops else ""
    return (
        f"{drop_words}{decision.model} on {decision.hardware}: {engine} on {device_words},"
        f" {context} ({grade_words})."
    )


def placement_row(decision: Decision, hardware: Hardware) -> tuple[str, ...]:
    """A model's engine, devices, context, and its memory of each device."""
    if not decision.plans:
        return "no plan", "-", "-", "-"
    plan = decision.plans[0]
    copies = plan.replicas.value
    numbers = [str(gpu.index) for gpu in hardware.gpus if gpu.uuid in plan.gpus]
    return (
        str(plan.engine),
        (f"GPU {', '.join(numbers)}" if numbers else "CPU")
        + (f" and {copies - 1} more" if copies > 1 else ""),
        f"{plan.max_model_len.value:,}",
        gib(plan.memory.promised_bytes),
    )


def gain_over(best_plan: Plan | None, neighbour: Plan, goal: Goal) -> tuple[float | None, str]:
    """The gain of another plan over the best one: as a part of its tokens/s, and in words."""
    context = f"{neighbour.max_model_len.value:,} tokens of context"
    if best_plan is None:
        return None, f"it could serve this, with {context}"
    texts = [context] if neighbour.max_model_len.value > best_plan.max_model_len.value else []
    if best_plan.quantizes_weights and not neighbour.quantizes_weights:
        texts.append("the weights as they are")
    gain = None
    if best_plan.speed is not None and neighbour.speed is not None:
        own_rate, other_rate = (
            (speed.stream.value, speed.total.value)[goal != "latency"]
            for speed in (best_plan.speed, neighbour.speed)
        )
        gain = round(other_rate / own_rate - 1, 3) if own_rate else None
    if gain is not None and abs(gain) >= _MIN_GAIN:
        texts.insert(0, f"{abs(gain):.0%} {'more' if gain > 0 else 'fewer'} tokens/s")
    return gain, ", ".join(texts) or "nothing that counts"


# A smaller gain is within the error of an estimate.
_MIN_GAIN = 0.03
_MAX_MISSING_ROWS = 3


def unavailable_gains(decision: Decision) -> list[str]:
    """The gains of engines that cannot start here, best first, without useless ones."""
    is_first = not decision.plans
    gaining_engines = [
        engine
        for engine in decision.engines
        if not engine.is_available and engine.gain_text not in ("", "no plan")
    ]
    gaining_engines = [
        engine for engine in gaining_engines if is_first or (engine.gain or 0) >= _MIN_GAIN
    ]
    gaining_engines.sort(key=lambda engine: -(engine.gain or 0))
    lines = []
    for engine in gaining_engines[:_MAX_MISSING_ROWS]:
        action = f"`{engine.remedy}`" if engine.remedy.startswith("fitserve") else engine.remedy
        cure = f"{action}: " if action else ""
        lines.append(f"{engine.engine}: {engine.reason}; {cure}{engine.gain_text}")
    return lines


def machine(hardware: Hardware) -> list[Row]:
    """The probe's reading, one row per thing."""
    rows = [
        Row(
            "CPU",
            f"{hardware.cpu_cores} cores",
            hardware.cpu_name or hardware.arch,
            " ".join(hardware.cpu_features),
        ),
        Row(
            "RAM",
            gib(hardware.ram_total_bytes),
            f"{gib(hardware.ram_available_bytes)} available",
            "",
        ),
        Row("shared memory", gib(hardware.shm_bytes), "", ""),
        Row("disk", gib(hardware.disk_free_bytes), "free", ""),
        Row(
            "driver",
            hardware.driver or "none",
            f"CUDA {hardware.cuda_driver}" if hardware.cuda_driver else "",
            "",
        ),
    ]
    for gpu in hardware.gpus:
        kind = " unified" if gpu.memory_kind == "unified" else ""
        rows.append(
            Row(
                f"GPU {gpu.index}",
                gpu.name,
                f"sm {gpu.capability}, {gib(gpu.total_bytes)}{kind}, {gib(gpu.free_bytes)}"
                f" free{_unused_words(gpu)}",
                gpu.uuid,
            )
        )
    for link in hardware.links:
        p2p = {True: "works", False: f"no ({link.p2p_status})", None: "unknown"}[link.p2p]
        rows.append(
            Row(
                f"GPU {link.a}-{link.b}", f"{link.nvlinks or 0} NVLinks", f"peer-to-peer: {p2p}", ""
            )
        )
    return rows


def _unused_words(gpu: Gpu) -> str:
    """The reason why fitserve leaves a GPU unused, behind its free memory."""
    if gpu.reservation_reason:
        return f", kept from fitserve: {gpu.reservation_reason}"
    return f", not used: {gpu.loss_reason}" if gpu.loss_reason else ""


def offer_words(decision: Decision) -> list[str]:
    """The offers of other models that the first plan takes."""
    return [offer.words for offer in decision.taken_offers]
