"""Whole models: kernels, backends, weights and KV cache of `decide` are those that each SGLang
version builds.

The golden answers are made anew by scripts/engine-answers
(tests/conformance/sglang_model_questions.py).
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache, lru_cache
from typing import Any

from gateway.domain import Decision, Gpu, Hardware, Plan, RejectedPlan
from gateway.profiles.profiles import Profiles
from tests.conformance import sglang_model_questions as asked
from tests.conformance.golden import pairs
from tests.conformance.model_cases import ONLINE, pooling
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import model_from_config
from tests.support.versions import SGLANG

PROFILES = Profiles()
ENGINES = {version: PROFILES.engine(f"sglang=={version}") for version in SGLANG}
RULES = PROFILES.rules(list(ENGINES.values()))
_ROW = re.compile(r"\S+ (.+) (\d+x\d+) (\d+)( \d+)?")
PlanOutcome = Plan | RejectedPlan


def machine(capability: str) -> Hardware:
    gpus = tuple(
        Gpu(
            index=index,
            uuid=f"GPU-{index}",
            name="GPU",
            capability=capability,
            total_bytes=asked.GPU_BYTES,
        )
        for index in range(8)
    )
    return Hardware(
        arch="x86_64", cpu_cores=8, ram_total_bytes=1 << 40, ram_available_bytes=1 << 40, gpus=gpus
    )


@lru_cache(maxsize=4)
def decision(model: str, quant: str, capability: str, tp: int) -> Decision:
    """Of all versions at once."""
    config = asked.config_of(model, quant)
    spec = model_from_config(config, task="embed" if pooling(model) else None)
    args = {"quantization": "fp8"} if quant == ONLINE else {}
    return decide(
        spec,
        machine(capability),
        list(ENGINES.values()),
        wish(args=args, tensor_parallel=tp, text_only=True),
        rules=RULES,
    )


def outcome(version: str, model: str, quant: str, capability: str, tp: int) -> PlanOutcome:
    """The result of the way in which nothing is changed."""
    outcome = decision(model, quant, capability, tp)
    plain = [plan for plan in outcome.plans if plan.engine.version == version and plan.cost == 0]
    rejections = [
        rejection for rejection in outcome.rejected if rejection.engine.version == version
    ]
    plan_outcomes: list[PlanOutcome] = [*plain, *rejections]
    return plan_outcomes[0]


def products_of(answer: dict[str, Any]) -> Counter[str]:
    """ "KERNEL KxN" of all layers that are quantized, and "KERNEL KxN EXPERTS" of experts."""
    counts: Counter[str] = Counter()
    for row in answer["layers"]:
        read = _ROW.fullmatch(row)
        assert read is not None, row
        kernel, size, count, experts = read.groups()
        if kernel != "torch":
            counts[f"{kernel} {size}{' experts' if experts else ''}"] += int(count)
    return counts


def products_ours(outcome: PlanOutcome) -> Counter[str]:
    counts: Counter[str] = Counter()
    for row in outcome.kernels:
        if row.layer.endswith(".w13"):
            continue
        kernel = row.kernel or row.status
        if row.layer.endswith(".experts.w2"):
            counts[f"{kernel} {row.n}x{row.k} experts"] += row.count
        elif kernel != "torch":
            counts[f"{kernel} {row.k}x{row.n}"] += row.count
    return counts


def attention_ours(outcome: PlanOutcome) -> list[str]:
    counts: Counter[tuple[str, int, str]] = Counter()
    for row in outcome.attention:
        counts[
            row.kind, 0 if row.kind == "recurrent" else row.head_dim, row.backend or row.status
        ] += row.layers
    return [" ".join(map(str, (*row, count))) for row, count in sorted(counts.items())]


def differences(version: str, case: tuple[str, str, str], tp: int, answer: Any) -> list[str]:
    """Answers of the planner that differ from the engine's."""
    plan = outcome(version, *case, tp)
    if isinstance(answer, str):
        return [] if isinstance(plan, RejectedPlan) else [f"the engine refuses: {answer}"]
    if isinstance(plan, RejectedPlan) and plan.verdict == "runtime_fail":
        return []  # knowledge beyond the choice of a kernel
    if isinstance(plan, RejectedPlan) and plan.verdict != "no_memory":
        return [f"the rules refuse: {plan.verdict}: {plan.reasons[0]}"]
    rows = []
    engine_products, planner_products = products_of(answer), products_ours(plan)
    if engine_products != planner_products:
        rows.append(
            f"kernels: theirs {dict(engine_products - planner_products)},"
            f" ours {dict(planner_products - engine_products)}"
        )
    if answer["attention"] != attention_ours(plan):
        rows.append(f"attention: theirs {answer['attention']}, ours {attention_ours(plan)}")
    memory = plan.memory
    if memory is None:
        return [*rows, "no sizes: "]
    if (
        case[1] != ONLINE
        and abs(memory.weights_bytes - answer["weights"]) > 0.005 * answer["weights"]
    ):
        rows.append(f"weights: theirs {answer['weights']}, ours {memory.weights_bytes}")
    _, _, tokens, size = answer["kv"]
    planner_bytes = memory.kv_bytes_per_token * tokens
    if abs(planner_bytes - size) > 0.01 * size:
        rows.append(
            f"KV cache: theirs {size / tokens:.0f} a token, ours {memory.kv_bytes_per_token}"
        )
    return rows


@cache
def compare_answers() -> tuple[int, dict[tuple[str, str], list[str]]]:
    """How many answers there are, and both answers by (difference, model and quantization)."""
    answers_by_case: dict[tuple[str, str, str], dict[str, Any]] = {}
    for version in SGLANG:
        for capability in asked.CAPABILITIES:
            for case, answer in pairs(asked, version, capability):
                if answer is not None:
                    answers_by_case.setdefault(case, {})[version] = answer
    count, differences_by_gap = 0, dict[tuple[str, str], list[str]]()
    for case, answers in answers_by_case.items():
        for place, tp in enumerate(asked.RANKS):
            for version, answer in answers.items():
                count += 1
                for difference in differences(version, case, tp, answer[place]):
                    key = difference.partition(":")[0], " ".join(case[:2])
                    differences_by_gap.setdefault(key, []).append(
                        f"{version} sm {case[2]} tp={tp}: {difference}"
                    )
    return count, differences_by_gap


# Known differences: (subject, models with quantizations), and why. The engine's answer wins
# wherever there is one.
GAPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # The router is never quantized, experts that every token takes are among the others, and
    # projections are one layer which no pattern for a part of it names; towers stay as they are.
    (
        "kernels",
        (
            "deepseek-v3 fp8-block", "deepseek-v3 nvfp4", "gemma-2-9b fp8-dynamic",
            "gemma-3-27b fp8-dynamic", "gemma-4-26b-a4b nvfp4",
            "glm-4-32b fp8-dynamic", "glm-4.5-air fp8-dynamic", "glm-4.5-air nvfp4",
            "llama-3.1-8b fp8-dynamic",
            "mistral-small-3.2-24b fp8-dynamic", "mistral-small-3.2-24b w4a16",
            "qwen1.5-moe-a2.7b gptq", "qwen2.5-7b fp8-block",
            "qwen3-30b-a3b nvfp4", "qwen3-8b fp8-block",
            "qwen3-embedding-0.6b fp8-dynamic", "qwen3-vl-8b fp8-block", "qwen3-vl-8b fp8-dynamic",
            "qwen3.6-35b-a3b gptq-language",
        ),
    ),
    # The same tower: the rules take it as quantized, and it has no such kernel then.
    ("the rules refuse", ("gemma-4-26b-a4b fp8-dynamic",)),
    # A projection of the sparse index, whose tensors are counted as one without kernels.
    ("kernels", ("deepseek-v3.2 fp8-block",)),
    # Unknown to the rules.
    ("kernels", ("gpt-oss-20b mxfp4", "llama-3.1-8b auto-round-awq", "llama-3.1-8b w4a8",
        "nemotron-3-nano-30b-a3b w4a16")),
    # The same layers, in bytes.
    (
        "weights",
        (
            "gemma-2-9b fp8-dynamic", "gemma-3-27b fp8-dynamic", "glm-4-32b fp8-dynamic",
            "glm-4.5-air fp8-dynamic",
            "llama-3.1-8b fp8-dynamic", "mistral-small-3.2-24b fp8-dynamic",
            "mistral-small-3.2-24b w4a16", "qwen1.5-moe-a2.7b gptq",
            "qwen2.5-7b fp8-block", "qwen3-30b-a3b gptq", "qwen3-8b fp8-block",
            "qwen3-embedding-0.6b fp8-dynamic",
            "qwen3-vl-8b fp8-block", "qwen3-vl-8b fp8-dynamic", "mixtral-8x7b gptq",
            "gemma-4-26b-a4b nvfp4",
        ),
    ),
    # Embeddings and towers that every rank has whole.
    (
        "weights",
        (
            "bge-m3 none", "gemma-3-1b gptq", "gemma-3-1b none", "gemma-3-27b none",
            "gemma-4-26b-a4b none",
            "gemma-4-31b auto-round-language", "gemma-4-31b none", "gemma-4-e4b none",
            "mistral-small-3.2-24b none",
            "qwen3.5-9b auto-round-language", "qwen3.5-9b none",
            "qwen3.6-35b-a3b auto-round-language",
            "qwen3.6-35b-a3b gptq-language", "qwen3.6-35b-a3b none",
        ),
    ),
    # Experts that are left in 16 bits without a word, or stored otherwise.
    (
        "weights",
        (
            "gpt-oss-20b mxfp4", "nemotron-3-nano-30b-a3b fp8-dynamic",
            "nemotron-3-nano-30b-a3b modelopt-nvfp4",
            "nemotron-3-nano-30b-a3b w4a16", "qwen3-30b-a3b modelopt-nvfp4",
        ),
    ),
    # A window that the engine computes without.
    (
        "attention",
        (
            "mistral-7b-v0.1 awq", "mistral-7b-v0.1 gptq", "mistral-7b-v0.1 none",
            "phi-3.5-moe none", "phi-4-mini fp8-dynamic",
            "phi-4-mini none", "phi-4-mini w4a16",
        ),
    ),
    # A tower, or layers that read another layer's cache, which the rules do not know or count.
    (
        "attention",
        (
            "gemma-4-26b-a4b none", "gemma-4-26b-a4b nvfp4", "gemma-4-31b auto-round-language",
            "gemma-4-31b none",
            "gemma-4-e4b none", "mistral-small-3.2-24b fp8-dynamic", "mistral-small-3.2-24b none",
            "mistral-small-3.2-24b w4a16",
            "qwen3.5-9b auto-round-language", "qwen3.5-9b none",
            "qwen3.6-35b-a3b auto-round-language",
            "qwen3.6-35b-a3b gptq-language", "qwen3.6-35b-a3b none",
        ),
    ),
    # States come in whole ones, and the rest of their share goes to tokens; encoders get a pool
    # too.
    (
        "KV cache",
        (
            "bge-m3 none", "granite-4.0-h-micro fp8-dynamic",
            "granite-4.0-h-micro none",
            "granite-4.0-h-micro w4a16", "granite-4.0-h-small none", "granite-4.0-h-small w4a16",
            "nemotron-nano-9b-v2 none",
            "qwen3.6-35b-a3b auto-round-language", "qwen3.6-35b-a3b gptq-language",
            "qwen3.6-35b-a3b none",
        ),
    ),
    # Whole models that the rules do not know to be refused: by models that take a layer for an
    # unquantized one, by layers that the rules believe unquantized, by a package that the image
    # does not have, by a configuration that transformers reads otherwise.
    (
        "the engine refuses",
        (
            "deepseek-v3 w4a16", "gemma-3-1b bitsandbytes-4bit", "gemma-3-27b w4a16",
            "llama-3.1-8b bitsandbytes-4bit",
            "llama-3.1-8b w4a8", "qwen3-next-80b-a3b awq", "qwen3-next-80b-a3b fp8-block",
            "qwen3-next-80b-a3b nvfp4",
            "qwen3.5-9b auto-round-language", "qwen3.5-9b none",
        ),
    ),
    # A layer which the engine leaves unquantized.
    (
        "the rules refuse",
        (
            "gemma-4-31b fp8-dynamic", "glm-4.5-air fp8-dynamic",
            "gpt-oss-20b mxfp4-ct", "qwen3-vl-8b fp8-block", "qwen3.5-9b auto-round-language",
            "qwen3.6-35b-a3b auto-round-language", "qwen3.6-35b-a3b gptq-language",
        ),
    ),
)  # fmt: skip


def test_the_planner_differs_from_the_engine_in_known_cases_alone() -> None:
    _, differences_by_gap = compare_answers()
    gaps = {(gap, name) for gap, names in GAPS for name in names}
    assert {key: lines[0] for key, lines in differences_by_gap.items() if key not in gaps} == {}
    assert gaps - differences_by_gap.keys() == set()


def test_most_of_many_answers_are_the_planners_own() -> None:
    count, differences_by_gap = compare_answers()
    differing = {
        line.partition(": ")[0] + name
        for (_, name), lines in differences_by_gap.items()
        for line in lines
    }
    assert count >= 660
    assert count - len(differing) >= 390
