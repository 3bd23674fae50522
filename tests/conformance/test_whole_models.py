"""Whole models: kernels, backends, weights and KV cache of `decide` are those that each vLLM
version builds.

The golden answers are made anew by scripts/engine-answers (tests/conformance/model_questions.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from gateway.domain import Decision, Gpu, Hardware, LayerKernel, Plan, RejectedPlan
from gateway.profiles.profiles import Profiles
from tests.conformance import model_questions
from tests.conformance.golden import pairs
from tests.conformance.layer_cases import TENSOR_PARALLEL
from tests.conformance.model_cases import ONLINE, config, machines, pooling
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import model_from_config
from tests.support.versions import VLLM

PROFILES = Profiles()
ENGINES = {version: PROFILES.engine(f"vllm=={version}") for version in VLLM}
RULES = PROFILES.rules(list(ENGINES.values()))
TIB = 1 << 40
PlanOutcome = Plan | RejectedPlan


def machine(capability: str) -> Hardware:
    """Eight GPUs on which nothing is too large."""
    gpus = tuple(
        Gpu(
            index=index, uuid=f"GPU-{index}", name="GPU", capability=capability, total_bytes=8 * TIB
        )
        for index in range(8)
    )
    return Hardware(
        arch="x86_64", cpu_cores=8, ram_total_bytes=TIB, ram_available_bytes=TIB, gpus=gpus
    )


@lru_cache(maxsize=1)
def decision(model: str, quant: str, capability: str) -> Decision:
    """Of all versions and numbers of ranks at once."""
    spec = model_from_config(config(model, quant), task="embed" if pooling(model) else None)
    args = {"quantization": "fp8"} if quant == ONLINE else {}
    return decide(spec, machine(capability), list(ENGINES.values()), wish(args=args), rules=RULES)


def outcome(version: str, model: str, quant: str, capability: str, tp: int) -> PlanOutcome:
    """The result of the way in which nothing is changed."""
    outcome = decision(model, quant, capability)
    own_rejections = [
        rejection for rejection in outcome.rejected if rejection.engine.version == version
    ]
    rejections = [
        row for row in own_rejections if (row.tensor_parallel, row.pipeline_parallel) == (tp, 1)
    ]
    plain = [plan for plan in outcome.plans if plan.engine.version == version and plan.cost == 0]
    plan_outcomes: list[PlanOutcome] = [
        plan for plan in plain if (plan.tensor_parallel.value, plan.data_parallel.value) == (tp, 1)
    ]
    return (plan_outcomes + rejections or own_rejections)[0]


# Words of the engine -> the verdicts that tell the same; the first whose words are in it.
REFUSALS = (
    ("attention heads", {"illegal_parallelism"}),
    ("Unknown quantization method", {"unsupported_quantization", "illegal_parallelism"}),
    ("has no attribute 'weight'", {"illegal_parallelism"}),
    ("Failed to find a kernel", {"no_kernel", "illegal_parallelism"}),
    ("", {"no_kernel"}),
)
# Tensors that the engine makes or shrinks only while it loads: quantized weights, scales. Their
# bytes are not compared.
UNLOADED = {ONLINE, "bitsandbytes-4bit"}
# The rules' name of an engine's method that is its own kernel.
NAMES = {
    "CompressedTensorsW8A16Fp8": "Marlin",
    "CompressedTensorsW4A16Fp4": "marlin",
    "CompressedTensorsW4A16Mxfp4": "Marlin",
}
# Their routers compute in float32, which makes them parameters here; some versions have a linear
# layer for it.
FLOAT_ROUTERS = {"ernie-4.5-21b-a3b", "glm-4.5-air", "minimax-m2"}


def layers_of(
    model: str, answer: dict[str, Any], position: int, ranks: Sequence[int] = TENSOR_PARALLEL
) -> Counter[tuple[str, int, int, str]]:
    """(name, inputs, outputs, kernel) -> how many, on one of ranks[position] ranks."""
    ranks_of_engine = [tp for tp in ranks if str(tp) not in answer.get("refused", {})]
    place = ranks_of_engine.index(ranks[position])
    counts: Counter[tuple[str, int, int, str]] = Counter()
    for row in answer["layers"]:
        name, kernels, sizes, count = row.split()
        kernel, k, n = (
            words[place if len(words) > 1 else 0]
            for words in (text.split("|") for text in (kernels, *sizes.split("x")))
        )
        if not (name.endswith(".gate") and kernel == "torch" and model in FLOAT_ROUTERS):
            counts[name, int(k), int(n), NAMES.get(kernel, kernel)] += int(count)
    return counts


def layers_ours(outcome: PlanOutcome) -> Counter[tuple[str, int, int, str]]:
    """The same of a plan; the two products of experts are one layer of the engine."""
    counts: Counter[tuple[str, int, int, str]] = Counter()
    for row in outcome.kernels:
        if row.layer.endswith(".experts.w13"):
            continue
        k, n, name = row.k or 0, row.n or 0, row.layer
        if name.endswith(".experts.w2"):
            k, n, name = n, k, name.removesuffix(".w2")
        counts[name, k, n, row.kernel or row.status] += row.count
    return counts


def attention_of(
    answer: dict[str, Any], position: int
) -> Counter[tuple[str, int, str, int | None]]:
    rows = (
        answer["attention"][position]
        if isinstance(answer["attention"], list)
        else answer["attention"]
    )
    counts: Counter[tuple[str, int, str, int | None]] = Counter()
    for row in rows.split(", "):
        kind, head, backend, *rest = row.split()
        version, count = (int(rest[0]), int(rest[1])) if len(rest) == 2 else (None, int(rest[0]))
        counts[kind, int(head), backend, version] += count
    return counts


def attention_ours(
    outcome: PlanOutcome, versions: set[tuple[str, int]]
) -> Counter[tuple[str, int, str, int | None]]:
    counts: Counter[tuple[str, int, str, int | None]] = Counter()
    for row in outcome.attention:
        if row.backend == "torch":  # for which the engine has no layer of attention
            continue
        head = 0 if row.kind == "recurrent" else row.head_dim
        version = row.version if (row.kind, head) in versions else None
        counts[row.kind, head, row.backend or row.status, version] += row.layers
    return counts


def per_token(summary: str) -> int:
    """Bytes of one token in all layers that keep every token; in the sliding ones where no layer
    does."""
    if not summary:
        return 0
    size, groups = summary.split(": ")
    rows = []
    for row in groups.split():
        count, kind = row.split("*")
        kind, block = kind.split("/")
        rows.append((int(count), kind, int(block)))
    growing = [row for row in rows if row[1] not in ("Mamba", "SlidingWindow")] or [
        row for row in rows if row[1] != "Mamba"
    ]
    return sum(-(-count * int(size) // block) for count, _, block in growing)


def ungrown(
    engine_layers: Counter[tuple[str, int, int, str]], outcome: PlanOutcome
) -> Counter[tuple[str, int, int, str]]:
    """With experts in the size that they have before some versions pad them."""
    sizes: dict[tuple[str, int, int], tuple[int, int]] = {}
    for row in outcome.kernels:
        if row.layer.endswith(".experts.w2") and row.padded_to and row.k and row.n:
            row_width, width = row.padded_to
            name, full_size = row.layer.removesuffix(".w2"), (row.n, row.k)
            sizes |= {
                (name, *grown_sizes): full_size
                for grown_sizes in ((width, row_width), (width, row.k), (row.n, row_width))
            }
    counts: Counter[tuple[str, int, int, str]] = Counter()
    for (name, k, n, kernel), count in engine_layers.items():
        counts[name, *sizes.get((name, k, n), (k, n)), kernel] += count
    return counts


def kept_scales(version: str, kernels: Sequence[LayerKernel], experts: int) -> int:
    """Bytes of scales in Triton's order, which these versions make while they load beside the
    checkpoint's."""
    if version not in ("0.18.0", "0.19.1"):
        return 0
    return sum(
        row.count * (row.k or 0) * (row.n or 0) // 32 * experts
        for row in kernels
        if row.kernel == "TRITON" and row.scheme.startswith("mxfp4")
    )


def spread_scales(kernels: Sequence[LayerKernel], experts: int) -> int:
    """Bytes that scales of blocks of 128 x 128 grow by, as Marlin makes one of 2 bytes for each
    group and column of one of 4 bytes for each block, while it loads."""
    return sum(
        row.count
        * -(-(row.k or 0) // 128)
        * ((row.n or 0) * 2 - -(-(row.n or 0) // 128) * 4)
        * (experts if ".experts." in row.layer else 1)
        for row in kernels
        if "marlin" in (row.kernel or "").lower() and row.scheme == "fp8_block"
    )


def prepared_scales(version: str, kernels: Sequence[LayerKernel], fields: dict[str, Any]) -> int:
    """Bytes that scales grow by while the engine loads them."""
    text_fields = fields.get("text_config", fields)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts: int = next((text_fields[name] for name in names if text_fields.get(name)), 0)
    return kept_scales(version, kernels, experts) + spread_scales(kernels, experts)


def built_alike(
    version: str,
    model: str,
    quant: str,
    answer: dict[str, Any],
    position: int,
    outcome: PlanOutcome,
) -> list[str]:
    """Different answers of the planner about a model that the engine builds."""
    lines = []
    engine_layers = ungrown(layers_of(model, answer, position), outcome)
    counts = layers_ours(outcome)
    # The towers are modules of transformers, whose layers are torch's.
    if version == "0.19.1" and model.startswith("gemma-4"):
        towers = ("vision_tower.", "audio_tower.")
        counts = Counter(
            {
                row: n
                for row, n in counts.items()
                if not (row[0].startswith(towers) and row[3] == "torch")
            }
        )
    if engine_layers != counts:
        lines.append(
            f"layers: theirs {dict(engine_layers - counts)}, ours {dict(counts - engine_layers)}"
        )
    attention = attention_of(answer, position)
    planner_attention = attention_ours(
        outcome, {(kind, head) for kind, head, _, number in attention if number}
    )
    if attention != planner_attention:
        lines.append(
            f"attention: theirs {dict(attention - planner_attention)},"
            f" ours {dict(planner_attention - attention)}"
        )
    weights, memory = answer["weights"][position], outcome.memory
    assert memory is not None
    # Tiles that Marlin fills up while it loads are counted here, and not among the tensors that it
    # loads into.
    padded_rows = [
        row
        for row in outcome.kernels
        if row.padded_to and ".experts." not in row.layer and row.k and row.n
    ]
    tiles = sum(
        row.count * (math.prod(row.padded_to or ()) - (row.k or 0) * (row.n or 0))
        for row in padded_rows
    )
    prepared_bytes = prepared_scales(version, outcome.kernels, config(model, quant))
    off = memory.weights_bytes - weights - prepared_bytes
    if quant not in UNLOADED and not -0.005 * weights <= off <= 0.005 * weights + tiles:
        lines.append(f"weights: theirs {weights}, ours {memory.weights_bytes}")
    kv = answer.get("kv", "")
    kv = kv[position] if isinstance(kv, list) else kv
    if per_token(kv) != memory.kv_bytes_per_token:
        lines.append(
            f"KV cache: theirs {kv}, {per_token(kv)} a token, ours {memory.kv_bytes_per_token}"
        )
    return lines


def differences(version: str, case: tuple[str, str, str], answer: dict[str, Any]) -> list[str]:
    """Answers of the planner that differ from the engine's, on any number of ranks."""
    model, quant, capability = case
    lines = []
    for position, tp in enumerate(TENSOR_PARALLEL):
        plan = outcome(version, model, quant, capability, tp)
        why = answer.get("refused", {}).get(str(tp))
        new_lines: list[str] = []
        if why is None and isinstance(plan, RejectedPlan) and plan.verdict != "runtime_fail":
            new_lines = [f"the engine builds it, ours {plan.verdict}: {plan.reasons[0]}"]
        elif why is None:
            new_lines = built_alike(version, model, quant, answer, position, plan)
        elif plan.verdict not in next(verdicts for words, verdicts in REFUSALS if words in why):
            new_lines = [f"the engine refuses: {why}; ours {plan.verdict}"]
        lines += [f"{version} {model} {quant} {capability} tp={tp}: {line}" for line in new_lines]
    return lines


def ask_questions(version: str) -> list[tuple[tuple[str, str, str], dict[str, Any]]]:
    """Each question with its answer, from the machine that it is about."""
    return [
        (case, answer)
        for capability in machines(version)
        for case, answer in pairs(model_questions, version, capability)
        if answer is not None
    ]


@cache
def compare_answers() -> tuple[list[str], list[str]]:
    """Differences, and those of the planner's answers that are "unknown"; case by case, since one
    decision is of all versions."""
    answers: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for version in VLLM:
        for case, answer in ask_questions(version):
            answers.setdefault(case, {})[version] = answer
    wrong, unknown_cases = [], []
    for case, case_answer in answers.items():
        for version, answer in case_answer.items():
            wrong += differences(version, case, answer)
            outcomes = [outcome(version, *case, tp) for tp in TENSOR_PARALLEL]
            rows = [
                row.layer
                for each_outcome in outcomes
                for row in each_outcome.kernels
                if row.status == "unknown"
            ]
            rows += [
                row.kind
                for each_outcome in outcomes
                for row in each_outcome.attention
                if row.status == "unknown"
            ]
            unknown_cases += [f"{version} {' '.join(case)}: {row}" for row in rows]
    return wrong, unknown_cases


def test_every_whole_model_is_built_or_refused_as_by_the_engine() -> None:
    assert compare_answers()[0] == []


def test_no_whole_model_has_an_unknown_part() -> None:
    assert compare_answers()[1] == []


def test_the_golden_answers_are_many_and_of_every_kind() -> None:
    answers = [
        (version, *case, answer) for version in VLLM for case, answer in ask_questions(version)
    ]
    assert len(TENSOR_PARALLEL) * len(answers) >= 3000
    assert all(
        {case for case, _ in ask_questions(version)} == set(model_questions.questions(version))
        for version in VLLM
    )
    assert len({model for _, model, *_ in answers}) >= 38
    assert len({quant for _, _, quant, *_ in answers}) >= 28
    assert len({capability for *_, capability, _ in answers}) == 6
    assert sum(len(answer.get("refused", {})) for *_, answer in answers) >= 250
    count = sum(
        sum(size is not None for size in answer["weights"])
        for *_, quant, _, answer in answers
        if quant not in UNLOADED
    )
    assert count >= 2500
