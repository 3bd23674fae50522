"""Corrections of expected speeds by measurements, for the measured plan and for similar plans.
Pure.

Corrections(facts).ratios(circumstances) -> by figure the factor of an expectation, and its evidence
correct_by_measurement(plan, facts) -> the plan with its own figures in place of expected ones
learn_from_bench(plan, bench, earlier_facts, time_s) -> the facts that a `fitserve bench` proves
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gateway.domain import Estimate, Fact, LayerAttention, LayerKernel, Plan, Speed

# Only for types: a plan does without the classes of running engines.
if TYPE_CHECKING:
    from gateway.domain import Bench

# The fields of Speed that are measured. A higher rate is better, and so is a shorter time.
FIGURES = ("stream", "total", "first_token_2k_s", "first_token_32k_s")
_SCOPE_NAMES = ("device", "engine", "kernel", "attention", "ranks", "basis", "figure")
_BENCH_SOURCE = "; fitserve bench, "
# Fields that must always agree. Expectations of another basis differ: corrections of data sheets do
# not hold for measured figures.
_EQUAL_NAMES = ("device", "engine", "basis")
# Names of the scope that have to agree, from the nearest to the widest.
_NEAR_SCOPES = (("kernel", "attention", "ranks"), ("kernel",), ())
_NEARNESS = ("plans with its kernels and ranks", "plans with its kernels", "plans of its engine")
# A measurement that differs by more says that something else was measured.
MIN_RATIO = 0.2
MAX_RATIO = 5.0
# Older measurements count as this many.
_MEMORY = 4
# Two runs of one plan differ by less.
_BAND = 0.05
# Traffic of clients corrects other loads too, relative to the expectation for each load.
_SERVED_BAND = 0.15
_SERVED_SOURCE = "; what clients were served"
_THOUSAND = 1000


class Ratio(NamedTuple):
    value: float
    source: str


class Corrections:
    """Corrections of one decision.

    The nearest measurements count: with the same kernels, attention backend and ranks; else with
    the same kernels; else of the engine version, on this device. Wider ones count by their number:
    a single plan corrects by half of its deviation (geometric mean). Among equally near ones,
    `fitserve bench` precedes traffic of clients.
    """

    def __init__(self, facts: Iterable[Fact] = ()) -> None:
        self._facts: dict[tuple[str | None, ...], list[Fact]] = {}
        self._ratios: dict[tuple[str, ...], dict[str, Ratio]] = {}
        for fact in facts:
            if fact.value is not None and set(_SCOPE_NAMES) <= set(fact.scope):
                self._facts.setdefault(tuple(fact.scope[name] for name in _EQUAL_NAMES), []).append(
                    fact
                )

    def __bool__(self) -> bool:
        return bool(self._facts)

    def ratios(self, circumstances: Mapping[str, str]) -> Mapping[str, Ratio]:
        """The ratios by figure; a figure without a measurement has none.

        circumstances: those of a plan, as `circumstances` returns them.
        """
        near_facts = self._facts.get(tuple(circumstances.get(name) for name in _EQUAL_NAMES))
        if not near_facts:
            return {}
        key = tuple(circumstances.values())
        if key not in self._ratios:
            result = (
                (figure, _nearest_ratio(near_facts, {**circumstances, "figure": figure}))
                for figure in FIGURES
            )
            self._ratios[key] = {figure: ratio for figure, ratio in result if ratio is not None}
        return self._ratios[key]


def measurement_scope(
    scope: Mapping[str, str],
    kernels: Sequence[LayerKernel],
    attention: Sequence[LayerAttention],
    source: str,
) -> dict[str, str]:
    """The scope of measurements of a plan. source: the origin of the machine's figures."""
    return {
        "device": scope.get("device", ""),
        "engine": scope.get("engine", ""),
        "kernel": "+".join(_main_kernels(kernels)),
        "attention": next(
            (layer_attention.backend for layer_attention in attention if layer_attention.backend),
            "unknown",
        ),
        "basis": _basis(source),
        "ranks": f"{scope.get('tensor_parallel', '1')}x{scope.get('pipeline_parallel', '1')}",
    }


def _basis(source: str) -> str:
    """The basis of an expectation, read from the source of a speed."""
    return re.split(" measured here|; ", source)[0]


def _main_kernels(rows: Sequence[LayerKernel]) -> list[str]:
    """The kernel of most of the weights, and that of the experts."""
    sums: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for row in rows:
        if row.kernel is not None:
            part = sums[".experts" in row.layer]
            part[row.kernel] = part.get(row.kernel, 0) + row.count * (row.k or 1) * (row.n or 1)
    return [max(part, key=part.__getitem__) for part in sums if part] or ["unknown"]


def _nearest_ratio(facts: list[Fact], scope: Mapping[str, str]) -> Ratio | None:
    for names, nearness in zip(_NEAR_SCOPES, _NEARNESS, strict=True):
        same_scope = [
            fact
            for fact in facts
            if all(fact.scope[name] == scope[name] for name in (*names, "figure"))
        ]
        same_scope = [fact for fact in same_scope if not _is_served(fact)] or same_scope
        if same_scope:
            logs = [math.log(clamp_ratio((fact.value or 0) / _THOUSAND)) for fact in same_scope]
            is_exact = names == _NEAR_SCOPES[0]
            part = 1.0 if is_exact else len(logs) / (len(logs) + 1)
            return Ratio(math.exp(part * sum(logs) / len(logs)), nearness)
    return None


def _is_served(fact: Fact) -> bool:
    """Whether the fact comes from client traffic of one plan."""
    return "fingerprint" in fact.scope


def correct_by_measurement(plan: Plan, facts: Iterable[Fact]) -> Plan:
    """The plan with measured figures in place of expected ones.

    facts: about this plan. Figures of another number of replicas or of concurrent requests are not
        those of the plan.
    """
    facts = tuple(facts)
    if not facts:
        return plan
    result = {
        fact.scope["figure"]: fact
        for fact in facts
        if fact.kind == "speed_measured" and _is_same_load(plan, fact)
    }
    if not {"stream", "total", "first_token_2k_s"} <= result.keys():
        return _correct_by_traffic(plan, facts)
    values = {figure: (fact.value or 0) / _THOUSAND for figure, fact in result.items()}
    figures = {figure: estimate(value, _BAND) for figure, value in values.items()}
    runs = f"fitserve bench, {result['stream'].samples or 1} times"
    speed = plan.speed
    if speed is None:
        measured_speed = Speed(
            **figures,
            concurrency=int(result["total"].scope["concurrency"]),
            grade="measured",
            source=runs,
        )
    else:
        base = _base_figures(speed)
        ratios = {
            **speed.ratios,
            **{figure: values[figure] / base[figure] for figure in figures.keys() & base.keys()},
        }
        measured_speed = speed.evolve(
            **figures,
            ratios=ratios,
            grade="measured",
            source=f"{speed.source.partition(_BENCH_SOURCE)[0]}; {runs}",
        )
    return plan.evolve(speed=measured_speed)


def _correct_by_traffic(plan: Plan, facts: Iterable[Fact]) -> Plan:
    """The plan with its expected figures, corrected by traffic of its clients under other loads."""
    speed = plan.speed
    if speed is None:
        return plan
    basis = _basis(speed.source)
    base = _base_figures(speed)
    ratios = {
        fact.scope["figure"]: fact.value / _THOUSAND
        for fact in facts
        if fact.kind == "speed_ratio"
        and fact.value
        and fact.scope.get("basis") == basis
        and fact.scope.get("figure") in base
    }
    if not ratios:
        return plan
    served_figures = {
        figure: estimate(base[figure] * ratio, _SERVED_BAND) for figure, ratio in ratios.items()
    }
    source = speed.source.partition(_SERVED_SOURCE)[0] + _SERVED_SOURCE
    return plan.evolve(
        speed=speed.evolve(
            **served_figures, ratios={**speed.ratios, **ratios}, grade="served", source=source
        )
    )


def _is_same_load(plan: Plan, fact: Fact) -> bool:
    if fact.scope.get("figure") not in FIGURES or not fact.value:
        return False
    load_here = {"replicas": str(plan.replicas.value)}
    if plan.speed is not None and fact.scope["figure"] == "total":
        load_here["concurrency"] = str(plan.speed.concurrency)
    return all(fact.scope.get(name) == value for name, value in load_here.items())


def learn_from_bench(
    plan: Plan, bench: Bench, earlier_facts: Iterable[Fact], time_s: float
) -> tuple[Fact, ...]:
    """Facts about the plan, and about similar plans. The new ones include `earlier_facts`."""
    earlier_by_scope = {
        tuple(sorted(fact.scope.items())): fact
        for fact in earlier_facts
        if fact.kind in ("speed_ratio", "speed_measured")
    }
    values = _bench_figures(plan, bench)
    plan_scope = {"fingerprint": plan.fingerprint, "replicas": str(plan.replicas.value)}
    scopes = {"total": {"concurrency": str(_concurrency(plan, bench))}}
    facts = [
        _fact(
            plan=plan,
            kind="speed_measured",
            scope={**plan_scope, **scopes.get(figure, {}), "figure": figure},
            value=value,
            earlier_by_scope=earlier_by_scope,
            time_s=time_s,
        )
        for figure, value in values.items()
    ]
    base = _base_figures(plan.speed)
    scope = measurement_scope(
        plan.scope, plan.kernels, plan.attention, plan.speed.source if plan.speed else ""
    )
    facts += [
        _fact(
            plan=plan,
            kind="speed_ratio",
            scope={**scope, "figure": figure},
            value=clamp_ratio(values[figure] / base[figure]),
            earlier_by_scope=earlier_by_scope,
            time_s=time_s,
        )
        for figure in values.keys() & base.keys()
    ]
    return tuple(facts)


def _bench_figures(plan: Plan, bench: Bench) -> dict[str, float]:
    concurrency = _concurrency(plan, bench)
    total = next(
        (level.tokens_per_s for level in bench.levels if level.concurrency == concurrency), None
    )
    result = {
        "stream": bench.stream,
        "total": total,
        "first_token_2k_s": bench.first_token_2k_s,
        "first_token_32k_s": bench.first_token_32k_s,
    }
    return {figure: value for figure, value in result.items() if value is not None}


def _concurrency(plan: Plan, bench: Bench) -> int:
    """The concurrent requests that `total` is about: the planned number, or where it is unknown,
    the most that were measured."""
    if plan.speed is not None:
        return plan.speed.concurrency
    return max((level.concurrency for level in bench.levels), default=0)


def _fact(
    plan: Plan,
    kind: str,
    scope: dict[str, str],
    value: float,
    earlier_by_scope: Mapping[tuple[tuple[str, str], ...], Fact],
    time_s: float,
) -> Fact:
    """The fact merged with an earlier one under the same driver and image: a geometric mean that
    favours new values."""
    old_fact = earlier_by_scope.get(tuple(sorted(scope.items())))
    samples = 1
    if (
        old_fact is not None
        and old_fact.kind == kind
        and old_fact.software == plan.software
        and old_fact.value
    ):
        samples = (old_fact.samples or 1) + 1
        former_ratio = old_fact.value / _THOUSAND
        value = former_ratio * (value / former_ratio) ** (1 / min(samples, _MEMORY))
    return Fact.model_validate(
        {
            "kind": kind,
            "scope": scope,
            "value": max(1, round(_THOUSAND * value)),
            "samples": samples,
            "grade": "verified",
            "under": plan.software,
            "source": f"fitserve bench, {samples} times",
            "at": time_s,
        }
    )


def _base_figures(speed: Speed | None) -> dict[str, float]:
    """The expectation before any correction."""
    if speed is None:
        return {}
    estimates = ((figure, getattr(speed, figure)) for figure in FIGURES)
    return {
        figure: estimate.value / speed.ratios.get(figure, 1.0)
        for figure, estimate in estimates
        if estimate is not None and estimate.value
    }


def estimate(value: float, band: float) -> Estimate:
    """Three digits, and the band around them."""
    return Estimate(
        value=_round_digits(value),
        low=_round_digits(value / (1 + band)),
        high=_round_digits(value * (1 + band)),
    )


def _round_digits(value: float) -> float:
    return float(f"{value:.3g}")


def clamp_ratio(ratio: float) -> float:
    return min(MAX_RATIO, max(MIN_RATIO, ratio))
