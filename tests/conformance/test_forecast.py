"""The share of forecasts from config.json alone that equal vLLM's builds: 109 families on 1, 2 and
4 ranks, unquantized and in FP8.

    python -m benchmarks.forecast          the figure, and every case that is wrong
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from gateway.domain import Plan, RejectedPlan
from gateway.errors import BadModel
from gateway.models.catalog.structure_files import structure_text
from tests.conformance import forecast_questions
from tests.conformance.forecast_cases import RANKS, cases, config
from tests.conformance.golden import pairs
from tests.conformance.test_whole_models import (
    ENGINES,
    RULES,
    attention_of,
    attention_ours,
    layers_of,
    layers_ours,
    machine,
    ungrown,
)
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import model_from_config
from tests.support.versions import VLLM

VERSION = VLLM[-1]
_EITHER = (".gate", ".router", ".conv1d", ".conv", ".q_conv1d", ".k_conv1d", ".v_conv1d")


class Verdict(NamedTuple):
    """One case on one number of ranks.

    guessed: the parts that the forecast calls a guess. weights: the error, of the engine's bytes;
    None: the planner refuses the model.
    kernels: kinds of layers whose size, kernel or count is wrong, of how many. backends: the same
    of attention, by kind, head size and backend.
    """

    case: str
    guessed: tuple[str, ...]
    weights: float | None
    kernels: tuple[int, int]
    backends: tuple[int, int]
    words: str


def forecast(family: str, quant: str, tp: int) -> Plan | RejectedPlan | str:
    """The plan in which nothing is changed, why there is none, or why the config is refused."""
    fields = config(family, quant)
    try:
        spec = model_from_config(fields, source=family, structure=structure_text(fields))
    except BadModel as error:
        return error.message
    decision = decide(
        spec,
        machine("9.0"),
        [ENGINES[VERSION]],
        wish(tensor_parallel=tp, speculative="off"),
        rules=RULES,
    )
    plain = [plan for plan in decision.plans if plan.data_parallel.value == 1]
    return (plain or decision.rejected)[0]


def guess_parsers(fields: dict[str, Any]) -> tuple[str, ...]:
    return model_from_config(fields, structure=structure_text(fields)).guessed


def rows_apart(engine_rows: Counter[Any], planner_rows: Counter[Any]) -> tuple[int, int, str]:
    """How many kinds of layers of either side have another count on the other; of how many.

    An unknown of the planner is not an answer, and is not compared.
    """
    # Sizes of a layer, or the head size of attention.
    size = slice(-3, -1) if planner_rows and len(next(iter(planner_rows))) == 3 else slice(1, 2)
    open_ = {kind[size] for kind in planner_rows if "unknown" in kind}
    engine_rows, planner_rows = (
        Counter({kind: count for kind, count in side.items() if kind[size] not in open_})
        for side in (engine_rows, planner_rows)
    )
    kinds = engine_rows.keys() | planner_rows.keys()
    differing_kinds = {kind for kind in kinds if engine_rows[kind] != planner_rows[kind]}
    words = (
        f"theirs {dict(engine_rows - planner_rows)}, ours {dict(planner_rows - engine_rows)}"
        if differing_kinds
        else ""
    )
    return len(differing_kinds), len(kinds), words


def nameless(rows: Counter[tuple[str, int, int, str]]) -> Counter[Any]:
    """Layers by size and kernel: a name decides nothing of a plan. Routers and convolutions are
    layers here and parameters there."""
    counts: Counter[Any] = Counter()
    for (name, k, n, kernel), count in rows.items():
        if not (kernel == "torch" and name.endswith(_EITHER)):
            counts[k, n, kernel] += count
    return counts


def judge(family: str, quant: str, place: int, answer: dict[str, Any]) -> Verdict:
    case = f"{family} {quant} tp={RANKS[place]}"
    config_fields, plan = config(family, quant), forecast(family, quant, RANKS[place])
    if isinstance(plan, str) or plan.memory is None:
        why = plan if isinstance(plan, str) else f"{plan.verdict}: {plan.reasons[0]}"
        return Verdict(case, (), None, (0, 0), (0, 0), why)
    weights = plan.memory.weights_bytes / answer["weights"][place] - 1
    engine_layers = ungrown(layers_of(family, answer, place, RANKS), plan)
    kernels = rows_apart(nameless(engine_layers), nameless(layers_ours(plan)))
    engine_attention = attention_of(answer, place) if "attention" in answer else Counter()
    planner_attention = attention_ours(
        plan, {(kind, head) for kind, head, _, number in engine_attention if number}
    )
    backends = rows_apart(engine_attention, planner_attention)
    words = f"weights {weights:+.2%}; layers: {kernels[2]}; attention: {backends[2]}"
    return Verdict(case, guess_parsers(config_fields), weights, kernels[:2], backends[:2], words)


@cache
def verdicts() -> tuple[Verdict, ...]:
    """Every case that the engine builds."""
    return tuple(
        judge(family, quant, place, answer)
        for (family, quant), answer in pairs(forecast_questions, VERSION, "9.0")
        for place in range(len(RANKS))
        if answer["weights"][place] is not None
    )


def figure(cases: Sequence[Verdict]) -> dict[str, float]:
    """Shares of the cases: guessed, refused, and, of those with a plan, weights within 0.5 %,
    kernels of layers wrong, backends of attention wrong."""
    cases_with_weights = [case for case in cases if case.weights is not None]
    kernels = [
        sum(column) for column in zip(*(case.kernels for case in cases_with_weights), strict=True)
    ]
    backends = [
        sum(column) for column in zip(*(case.backends for case in cases_with_weights), strict=True)
    ]
    return {
        "guessed": sum(bool(case.guessed) for case in cases) / len(cases),
        "refused": 1 - len(cases_with_weights) / len(cases),
        "weights within 0.5 %": sum(map(near, cases_with_weights)) / len(cases_with_weights),
        "kernels wrong": kernels[0] / kernels[1],
        "backends wrong": backends[0] / backends[1],
    }


def near(verdict: Verdict) -> bool:
    return verdict.weights is not None and abs(verdict.weights) <= 0.005


def test_the_forecast_from_config_alone_equals_the_engines_model() -> None:
    shares = figure(verdicts())
    assert shares["weights within 0.5 %"] >= 0.99
    assert shares["kernels wrong"] <= 0.02
    assert shares["backends wrong"] <= 0.02
    assert shares["guessed"] <= 0.02
    assert shares["refused"] == 0


def test_verdicts_without_a_guess_have_the_weights_of_the_engine() -> None:
    sure = [
        verdict for verdict in verdicts() if verdict.weights is not None and not verdict.guessed
    ]
    assert [verdict.case for verdict in sure if not near(verdict)] == []


def test_the_engine_builds_most_families() -> None:
    families = {verdict.case.split()[0] for verdict in verdicts()}
    assert len(families) >= 93
    assert len({family for family, _ in cases()}) == 109
