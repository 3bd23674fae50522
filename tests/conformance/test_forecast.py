"""How often the forecast from config.json alone is what vLLM builds: 109 families on 1, 2 and 4
ranks, unquantized and in FP8.

    python -m benchmarks.forecast          the figure, and every case that is wrong
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from gateway.domain import Plan, Rejected
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


def forecast(family: str, quant: str, tp: int) -> Plan | Rejected | str:
    """The plan in which nothing is changed, why there is none, or why the config is refused."""
    fields = config(family, quant)
    try:
        spec = model_from_config(fields, source=family, structure=structure_text(fields))
    except BadModel as error:
        return error.message
    decided = decide(
        spec,
        machine("9.0"),
        [ENGINES[VERSION]],
        wish(tensor_parallel=tp, speculative="off"),
        rules=RULES,
    )
    plain = [plan for plan in decided.plans if plan.data_parallel.value == 1]
    return (plain or decided.rejected)[0]


def guess_parsers(fields: dict[str, Any]) -> tuple[str, ...]:
    return model_from_config(fields, structure=structure_text(fields)).guessed


def rows_apart(theirs: Counter[Any], mine: Counter[Any]) -> tuple[int, int, str]:
    """How many kinds of layers of either side have another count on the other; of how many.

    What the planner calls unknown is no answer, and is not compared.
    """
    # Sizes of a layer, or the head size of attention.
    size = slice(-3, -1) if mine and len(next(iter(mine))) == 3 else slice(1, 2)
    open_ = {kind[size] for kind in mine if "unknown" in kind}
    theirs, mine = (
        Counter({kind: count for kind, count in side.items() if kind[size] not in open_})
        for side in (theirs, mine)
    )
    kinds = theirs.keys() | mine.keys()
    apart = {kind for kind in kinds if theirs[kind] != mine[kind]}
    words = f"theirs {dict(theirs - mine)}, ours {dict(mine - theirs)}" if apart else ""
    return len(apart), len(kinds), words


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
    asked, mine = config(family, quant), forecast(family, quant, RANKS[place])
    if isinstance(mine, str) or mine.memory is None:
        why = mine if isinstance(mine, str) else f"{mine.verdict}: {mine.reasons[0]}"
        return Verdict(case, (), None, (0, 0), (0, 0), why)
    weights = mine.memory.weights_bytes / answer["weights"][place] - 1
    theirs = ungrown(layers_of(family, answer, place, RANKS), mine)
    kernels = rows_apart(nameless(theirs), nameless(layers_ours(mine)))
    told = attention_of(answer, place) if "attention" in answer else Counter()
    said = attention_ours(mine, {(kind, head) for kind, head, _, number in told if number})
    backends = rows_apart(told, said)
    words = f"weights {weights:+.2%}; layers: {kernels[2]}; attention: {backends[2]}"
    return Verdict(case, guess_parsers(asked), weights, kernels[:2], backends[:2], words)


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
    planned = [case for case in cases if case.weights is not None]
    kernels = [sum(column) for column in zip(*(one.kernels for one in planned), strict=True)]
    backends = [sum(column) for column in zip(*(one.backends for one in planned), strict=True)]
    return {
        "guessed": sum(bool(case.guessed) for case in cases) / len(cases),
        "refused": 1 - len(planned) / len(cases),
        "weights within 0.5 %": sum(map(near, planned)) / len(planned),
        "kernels wrong": kernels[0] / kernels[1],
        "backends wrong": backends[0] / backends[1],
    }


def near(one: Verdict) -> bool:
    return one.weights is not None and abs(one.weights) <= 0.005


def test_the_forecast_from_config_alone_is_what_the_engine_builds() -> None:
    found_figure = figure(verdicts())
    assert found_figure["weights within 0.5 %"] >= 0.99
    assert found_figure["kernels wrong"] <= 0.02
    assert found_figure["backends wrong"] <= 0.02
    assert found_figure["guessed"] <= 0.02
    assert found_figure["refused"] == 0


def test_verdicts_without_a_guess_have_the_weights_of_the_engine() -> None:
    sure = [
        verdict for verdict in verdicts() if verdict.weights is not None and not verdict.guessed
    ]
    assert [one.case for one in sure if not near(one)] == []


def test_the_engine_builds_most_families() -> None:
    built = {verdict.case.split()[0] for verdict in verdicts()}
    assert len(built) >= 93
    assert len({family for family, _ in cases()}) == 109
