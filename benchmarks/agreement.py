"""Where forecast and inquiry agree: every model of tests/models, by the rules and by the engine's
own code, for versions and capabilities.

    python benchmarks/agreement.py [--engine vllm==0.33.0 ...] [--capability 8.6 ...] [--model NAME
    ...] [--rules 0.26.0]

For each version and capability one process builds the models on 1, on 2 and on 2 x 2 GPUs (large
ones: memory refuses nothing) as the planner's command lines say. It prints a row for each version,
and each gap once, with how often it was met. The engines' sources and the Python that asks them are
those of scripts/engine-answers; one process takes a minute of one core.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from gateway.domain import (  # noqa: E402
    Decision,
    Engine,
    EngineAnswer,
    Hardware,
    ModelSpec,
    Question,
    RuleGap,
    Wish,
)
from gateway.engines.common.candidate import EngineRules  # noqa: E402
from gateway.engines.common.planning_input import PlanningInput  # noqa: E402
from gateway.engines.inquiry.document import StatedGpus, document, read_answers  # noqa: E402
from gateway.errors import BadModel  # noqa: E402
from gateway.models.spec import read_model  # noqa: E402
from gateway.planner.decide import decide  # noqa: E402
from gateway.planner.service.checking import model_files  # noqa: E402
from gateway.profiles.profiles import Profiles  # noqa: E402
from tests.conformance.kept import Kept  # noqa: E402
from tests.conformance.layer_cases import QUANTS  # noqa: E402
from tests.support.asked_python import asked_in  # noqa: E402
from tests.support.versions import since  # noqa: E402

ENGINES = (
    *(f"vllm=={version}" for version in ("0.18.0", "0.19.1", "0.26.0", "0.30.0", "0.33.0")),
    "sglang==0.5.10.post1",
    "sglang==0.5.23",
)
CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
QUANTIZED = {
    "llama-3.1-8b": ("gptq", "awq", "w4a16", "fp8-dynamic", "fp8-block", "nvfp4"),
    "qwen3-30b-a3b": ("gptq", "awq", "w4a16", "fp8-block", "nvfp4"),
    "qwen3.6-35b-a3b": ("auto-round-language",),
    "gpt-oss-20b": ("mxfp4",),
    "deepseek-v3": ("fp8-block",),
}
LAYOUTS = ((1, 1), (2, 1), (2, 2))
_OLDER_BEFORE = {
    "vllm": "0.33",
    "sglang": "0.5.11",
}  # versions before are asked with the transformers that they were made for
_MEMORY = 1 << 40
# What a version says of a model for which the environment that asks lacks something.
_NOT_HERE = "failed to be inspected"


class Case(NamedTuple):
    """A model, and what is asked about it."""

    name: str
    config: dict[str, Any]
    spec: ModelSpec
    forecast: Decision
    questions: list[Question]


class Forecaster(NamedTuple):
    """A version, and the rules that forecast for it."""

    engine: Engine
    rules: EngineRules


class Tally(NamedTuple):
    """Of one version on one capability: questions that agree, that do not, that nobody answered;
    models that were not asked about."""

    counts: Counter[str]
    gaps: list[tuple[str, RuleGap]]
    silent: list[str]


def cases(
    profiles: Profiles, by: Forecaster, machine: Hardware, wanted: list[str]
) -> Iterator[Case | str]:
    """For each model the case, or why there is nothing to ask."""
    for path in sorted((ROOT / "tests/models").glob("*.json")):
        for quant in ("", *QUANTIZED.get(path.stem, ())):
            name = f"{path.stem} {quant}".strip()
            if wanted and path.stem not in wanted:
                continue
            config = json.loads(path.read_text()) | (
                {"quantization_config": QUANTS[quant]} if quant else {}
            )
            try:
                spec = read_model(name, None, config, None, None, (), None)
            except BadModel as error:
                yield f"{name}: {error.message}"
                continue
            forecast = decided(profiles, by, machine, spec, {})
            rows = [
                (one.tensor_parallel.value, one.pipeline_parallel.value, one.question)
                for one in forecast.plans
            ]
            rows += [
                (one.tensor_parallel, one.pipeline_parallel, one.question)
                for one in forecast.rejected
            ]
            asked = [
                question
                for tp, pp, question in rows
                if question is not None and (tp, pp) in LAYOUTS
            ]
            if asked:
                yield Case(name, config, spec, forecast, list(dict.fromkeys(asked)))
            else:
                yield (
                    f"{name}:"
                    f" {forecast.rejected[0].reasons[0] if forecast.rejected else 'no such layout'}"
                )


def decided(
    profiles: Profiles,
    forecaster: Forecaster,
    machine: Hardware,
    spec: ModelSpec,
    answers: dict[Question, EngineAnswer],
) -> Decision:
    engine, rules = forecaster
    wish = Wish(name="m", source="m")
    given = PlanningInput(spec, machine, wish, gpus=profiles.gpus, answers=answers)
    return decide(given, [engine], {engine.ref: rules})


def forecaster(profiles: Profiles, ref: str, other: str | None) -> Forecaster:
    """The version with its own rules, or with those of another version in their place."""
    engine = profiles.engine(ref)
    ruled = profiles.engine(f"{engine.kind}=={other}") if other else engine
    rules = profiles.rules([ruled])[ruled.ref]
    return Forecaster(engine.evolve(traits=ruled.traits, method_rules=ruled.method_rules), rules)


def tally(
    profiles: Profiles, kept: Kept, ref: str, capability: str, wanted: list[str], rules: str | None
) -> Tally:
    by = forecaster(profiles, ref, rules)
    whole = profiles.hardware("8xh100")
    cards = [
        gpu.evolve(capability=capability, total_bytes=_MEMORY, free_bytes=_MEMORY, name="GPU")
        for gpu in whole.gpus
    ]
    machine = whole.evolve(gpus=tuple(cards))
    found = list(cases(profiles, by, machine, wanted))
    silent = [one for one in found if isinstance(one, str)]
    asked = [one for one in found if not isinstance(one, str)]
    counts, gaps = Counter({"not asked": len(silent)}), []
    for case, answers in zip(
        asked, ask(kept, ref, StatedGpus(capability, _MEMORY, 8, "GPU"), asked), strict=True
    ):
        contradicted: dict[tuple[str, ...], list[RuleGap]] = {}
        for gap in decided(profiles, by, machine, case.spec, answers).gaps:
            contradicted.setdefault(gap.argv, []).append(gap)
        for question in case.questions:
            if question not in answers or _NOT_HERE in answers[question].refused:
                counts["unknown"] += 1
                silent.append(f"{case.name}: no answer")
            elif question.argv in contradicted:
                counts["gap"] += 1
                gaps += [(case.name, gap) for gap in contradicted[question.argv]]
            else:
                counts["agree"] += 1
    return Tally(counts, gaps, silent)


def ask(
    kept: Kept, ref: str, gpus: StatedGpus, asked: list[Case]
) -> list[dict[Question, EngineAnswer]]:
    """The answers about each case: one process, and another for what a process that died did not
    come to."""
    answers: list[dict[Question, EngineAnswer]] = [{} for _ in asked]
    kind, _, version = ref.partition("==")
    begin = 0
    while begin < len(asked):
        whole: dict[str, Any] = {"models": []}
        for case in asked[begin:]:
            files = model_files(case.config, None)
            one = json.loads(document(kind, gpus, model=files, questions=case.questions))
            whole = {**one, "models": [*whole["models"], *one["models"]]}
        whole |= {"sources": str(kept.sources(kind, version)), "version": False}
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/"),
            "PYTHONHASHSEED": "0",
        }
        if not since(version, _OLDER_BEFORE[kind]):
            environment["PYTHONPATH"] = str(kept.older())
        answered, ended = asked_in(kept.environment(), json.dumps(whole).encode(), environment)
        lines: dict[int, list[bytes]] = {}
        for line in answered:
            if "model" in (said := json.loads(line)):
                lines.setdefault(said["model"], []).append(line)
        for number, told in lines.items():
            answers[begin + number] = read_answers(
                told, asked[begin + number].questions, f"sources of {ref}"
            )
        begin += max(lines, default=0) + 1
        if not ended:
            break
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", action="append", help=f"default: {', '.join(ENGINES)}")
    parser.add_argument("--capability", action="append", help=f"default: {', '.join(CAPABILITIES)}")
    parser.add_argument(
        "--model", action="append", default=[], help="of tests/models; default: all"
    )
    parser.add_argument(
        "--rules", help="the version whose rules forecast, in place of each version's own"
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="processes at a time, of 1 GB of memory each"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache/engines")
    args = parser.parse_args()
    profiles, kept = Profiles(), Kept(args.folder.resolve())
    print("engine                 capability    agree    gap    unknown    not asked    seconds")
    everything: Counter[tuple[str, str, str]] = Counter()
    where: dict[tuple[str, str, str], set[str]] = {}
    silent: Counter[tuple[str, str]] = Counter()

    def one(pair: tuple[str, str]) -> tuple[tuple[str, str], Tally, float]:
        began = time.monotonic()
        return pair, tally(profiles, kept, *pair, args.model, args.rules), time.monotonic() - began

    pairs = [
        (ref, capability)
        for ref in args.engine or ENGINES
        for capability in args.capability or CAPABILITIES
    ]
    with ThreadPoolExecutor(args.jobs) as pool:
        for (ref, capability), found, seconds in pool.map(one, pairs):
            row = "".join(
                f"{found.counts[name]:>9}" for name in ("agree", "gap", "unknown", "not asked")
            )
            print(f"{ref:<22} {capability:<8}{row}  {seconds:>9.0f}", flush=True)
            for name, gap in found.gaps:
                key = ref, name, f"{gap.about}: {gap.forecast} | {gap.answer}"
                everything[key] += 1
                where.setdefault(key, set()).add(capability)
            silent.update((ref, line) for line in found.silent)
    for (ref, name, words), count in sorted(everything.items()):
        print(
            f"gap {ref} {name} on {', '.join(sorted(where[ref, name, words]))} ({count}):"
            f" {words[:400]}"
        )
    for (ref, line), count in sorted(silent.items()):
        print(f"not asked {ref} ({count}): {line[:200]}")


if __name__ == "__main__":
    main()
