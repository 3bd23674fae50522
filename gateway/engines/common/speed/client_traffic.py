"""Traffic of clients by an engine's counters, and the facts that follow about expectations. Pure.

sum_series(text, names) -> Counts           the counters of /metrics now
traffic_between(before, after) -> Served    traffic in a stretch of time
build_clock(plan, spec, engine, machine, ...) -> StepClock
                                            expected time of the work of a running plan
learn_from_traffic(plan, windows, clock, earlier_facts, time_s) -> facts
                                            each stretch against the expectation under its own load
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gateway.domain import Engine, Fact, Hardware, ModelSpec, Plan, TrafficSums
from gateway.engines.common.kernels.gpus import GpuTable
from gateway.engines.common.kind import EngineKind
from gateway.engines.common.layers.build import build, relevant_traits, set_method
from gateway.engines.common.layers.stages import stage
from gateway.engines.common.speed.correction import clamp_ratio, measurement_scope
from gateway.engines.common.speed.count import rank_work_of_kernels
from gateway.engines.common.speed.gpu_measurements import MachineMeasurements
from gateway.engines.common.speed.machine import SpeedKnowledge, build_machine
from gateway.engines.common.speed.step import StepClock
from gateway.models.rank import Rank

# Counts by the names of Engine.counters. Some engines omit a counter until its first count.
Counts = Mapping[str, float]
# An engine has far fewer series of one name: one for each rank and kind of request.
_MAX_SERIES = 256
_MAX_VALUE = 1e15
# Smaller counts say more about the first and the last request than about the pace.
_MIN_ANSWER_TOKENS = 256.0
_MIN_STEPS = 64.0
# The figures need this many stretches, and the middle half of them must differ by less than this.
MIN_STRETCHES = 3
_STEADY_RATIO = 1.25
# A request counts as single up to this mean number of running requests.
_SINGLE_REQUEST = 1.5
# The first token of a shorter prompt says more about the engine's overhead than about prefill.
_MIN_PROMPT = 1024
_LONG_PROMPT = 8192
# Where a tenth of the prompt was in a cache, reading took less than is expected of it.
_MAX_CACHED_SHARE = 0.1
# A known fact is replaced if its value changed by this factor.
_MIN_CHANGE_SHARE = 0.03
_THOUSAND = 1000


def sum_series(text: bytes, names: Mapping[str, str]) -> Counts | None:
    """The sums of the series that `names` names, over all their labels. None for a text that no
    engine writes.

    Source of the form: https://prometheus.io/docs/instrumenting/exposition_formats/
    """
    text_after_newline = b"\n" + text
    result = dict[str, float]()
    for counter, name in names.items():
        try:
            values = _metric_values(text_after_newline, b"\n" + name.encode())
        except ValueError:
            return None
        if values:
            result[counter] = sum(values)
    return result or None


def highest(text: bytes, name: str) -> float | None:
    """The highest value of a series, over all its labels. None where it is not there, or no
    number."""
    try:
        return max(_metric_values(b"\n" + text, b"\n" + name.encode()), default=None)
    except ValueError:
        return None


def _metric_values(text: bytes, name: bytes) -> list[float]:
    """The values of a metric in the text. Raises ValueError."""
    values: list[float] = []
    position = text.find(name)
    while position >= 0:
        end = text.find(b"\n", position + 1)
        number_text = text[position + len(name) : end if end >= 0 else None]
        if number_text[:1] in (b"{", b" "):
            value = float(number_text.rpartition(b" ")[2])
            if not 0 <= value <= _MAX_VALUE or len(values) >= _MAX_SERIES:
                raise ValueError
            values.append(value)
        position = text.find(name, position + 1)
    return values


def traffic_between(former_values: Counts, new_values: Counts) -> TrafficSums | None:
    """None where too little happened to measure a pace, or where the engine began to count from
    zero."""
    past = {name: value - former_values.get(name, 0.0) for name, value in new_values.items()}
    if any(value < 0 for value in past.values()) or any(
        name not in new_values for name in former_values
    ):
        return None
    requests = past.get("requests", 0.0)
    outputs = past.get("between", 0.0)
    answer_tokens = past.get("written", outputs + requests)
    steps = past.get("steps", 0.0)
    if requests <= 0 or outputs <= 0 or answer_tokens < _MIN_ANSWER_TOKENS or steps < _MIN_STEPS:
        return None
    prompt = past.get("prompt", 0.0)
    return TrafficSums(
        requests=requests,
        prompt=prompt,
        cached=min(prompt, past.get("cached", 0.0)),
        answer_tokens=answer_tokens,
        outputs=outputs + requests,
        steps=steps,
        reading_s=max(0.0, past.get("first_s", 0.0) - past.get("queued_s", 0.0)),
        writing_s=past.get("between_s", 0.0),
    )


class ClockTables(NamedTuple):
    """Knowledge that the expected duration of a plan's work follows from."""

    gpus: GpuTable
    speed_knowledge: SpeedKnowledge
    facts: Sequence[Fact]


def build_clock(
    plan: Plan,
    spec: ModelSpec,
    engine: Engine,
    kind: EngineKind,
    machine: Hardware,
    tables: ClockTables,
) -> StepClock | None:
    """The planner's clock for the plan; None for GPUs of different models or of unknown speed.

    Raises BadModel.
    """
    gpu_table, speed_knowledge, facts = tables
    gpu_by_uuid = {gpu.uuid: gpu for gpu in machine.gpus}
    gpus = [gpu_by_uuid[uuid] for uuid in plan.gpus if uuid in gpu_by_uuid]
    if (
        len({gpu.name for gpu in gpus}) != 1
        or len(gpus) < len(plan.gpus)
        or plan.speed is None
        or "kv_cache_dtype" not in plan.scope
    ):
        return None
    tp, pp = plan.tensor_parallel.value, plan.pipeline_parallel.value
    dp = plan.data_parallel.value
    ep = tp * dp if plan.expert_parallel.value else 1
    stored_dtype = plan.scope["kv_cache_dtype"]
    rank = Rank(
        tp=tp,
        pp=pp,
        ep=ep,
        dtype=plan.dtype.value,
        kv_dtype=stored_dtype,
        capability=gpus[0].capability or "",
        dp=dp,
    )
    built_model = build(
        set_method(spec, plan.scope.get("quantization", "")), relevant_traits(spec, engine.traits)
    )
    model_stage = stage(built_model, engine, kind, spec.architecture, pp)
    work = rank_work_of_kernels(
        spec=spec,
        stage=model_stage,
        rank=rank,
        layer_kernels=plan.kernels,
        gpus=gpu_table,
        traits=engine.traits,
        table=speed_knowledge.table,
    )
    links = {frozenset((link.a, link.b)): link for link in machine.links}
    measurements = MachineMeasurements(facts)
    local_machine = build_machine(
        gpus, links, speed_knowledge, measurements, has_direct_links=plan.custom_all_reduce.value
    )
    graphs = speed_knowledge.table.graphs(
        engine.kind, engine.version, plan.max_num_seqs.value, is_eager=plan.enforce_eager.value
    )
    if local_machine is None:
        return None
    return StepClock(work, local_machine, speed_knowledge.table.kind_table(engine.kind), graphs)


def learn_from_traffic(
    plan: Plan,
    windows: Sequence[TrafficSums],
    clock: StepClock,
    earlier_facts: Iterable[Fact],
    time_s: float,
) -> tuple[Fact, ...]:
    """Facts from traffic: the median of measured relative to expected speed over the stretches, if
    they agree.

    Plans that draft tokens teach nothing, because acceptance depends on the prompts.
    """
    if plan.speed is None or plan.speculation.value != "none":
        return ()
    earlier_by_scope = {
        tuple(sorted(fact.scope.items())): fact
        for fact in earlier_facts
        if fact.kind == "speed_ratio"
    }
    ratio_scope = {
        **measurement_scope(plan.scope, plan.kernels, plan.attention, clock.machine.source),
        "fingerprint": plan.fingerprint,
    }
    result: dict[str, list[float]] = {}
    for stretch in windows:
        for figure, ratio in ratios(plan, stretch, clock).items():
            result.setdefault(figure, []).append(ratio)
    facts = []
    for figure, values in result.items():
        if len(values) < MIN_STRETCHES or not _is_steady(values):
            continue
        value = round(_THOUSAND * _quantile_of_quarters(values, 2))
        scope = {**ratio_scope, "figure": figure}
        old_fact = earlier_by_scope.get(tuple(sorted(scope.items())))
        if (
            old_fact is None
            or old_fact.software != plan.software
            or abs(math.log(value / (old_fact.value or 1))) > _MIN_CHANGE_SHARE
        ):
            fields = {
                "kind": "speed_ratio",
                "scope": scope,
                "value": value,
                "samples": len(values),
                "grade": "verified",
            }
            source = f"the engine's counters over {len(values)} stretches of serving"
            facts.append(
                Fact.model_validate(
                    {**fields, "under": plan.software, "source": source, "at": time_s}
                )
            )
    return tuple(facts)


def ratios(plan: Plan, traffic: TrafficSums, clock: StepClock) -> dict[str, float]:
    """The ratio of each figure of Speed: measured speed relative to the expectation for this
    load."""
    limit = plan.max_num_batched_tokens.value
    at_once = traffic.at_once
    length = traffic.prompt / traffic.requests
    new_tokens = (traffic.prompt - traffic.cached) / traffic.requests
    context = min(
        length + traffic.answer_tokens / traffic.requests / 2, float(plan.max_model_len.value)
    )
    step_s = clock.decode_s(at_once, context)
    reads_s = clock.prompts_s(traffic.requests, new_tokens, limit) if new_tokens >= 1 else 0.0
    result: dict[str, float] = {}
    if at_once <= _SINGLE_REQUEST:
        if traffic.writing_s:
            result["stream"] = step_s * (traffic.outputs - traffic.requests) / traffic.writing_s
        if (
            traffic.reading_s
            and new_tokens >= _MIN_PROMPT
            and new_tokens >= (1 - _MAX_CACHED_SHARE) * length
        ):
            expected_s = clock.table.request_overhead_s + reads_s / traffic.requests
            figure = "first_token_2k_s" if new_tokens < _LONG_PROMPT else "first_token_32k_s"
            result[figure] = traffic.reading_s / traffic.requests / expected_s
    elif reads_s <= traffic.steps * step_s and traffic.writing_s:
        # Each request waits for the prompts of all, so that all of the time counts for all of them.
        # Where reading takes most of the time, too many requests are between two outputs for
        # `at_once` to show how many there are.
        expected_s = at_once * (traffic.steps * step_s + reads_s)
        planned_requests = (plan.speed.concurrency if plan.speed else 1) / (
            plan.replicas.value * plan.data_parallel.value
        )
        figure = "stream" if at_once < math.sqrt(planned_requests) else "total"
        result[figure] = expected_s / (traffic.reading_s + traffic.writing_s)
    return {figure: clamp_ratio(ratio) for figure, ratio in result.items()}


def _is_steady(values: list[float]) -> bool:
    """Whether the middle half of them agree."""
    return _quantile_of_quarters(values, 3) <= _quantile_of_quarters(values, 1) * _STEADY_RATIO


def _quantile_of_quarters(values: list[float], quarters: int) -> float:
    """The quartile with this number, interpolated between two values."""
    ordered_values = sorted(values)
    position = quarters * (len(values) - 1) / 4
    low = int(position)
    return ordered_values[low] + (position - low) * (
        ordered_values[min(low + 1, len(ordered_values) - 1)] - ordered_values[low]
    )
