"""Products of dense layers and runners of experts in SGLang: the rules of each version agree with
that version's own code."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.engines.common.kernels.expert_kernels import choose_moe
from gateway.engines.common.kernels.linear import KernelChoice, choose
from gateway.engines.common.layers.build import build
from gateway.engines.common.refusal import RefusalError
from gateway.engines.common.variant import Variant
from gateway.engines.sglang.engine import SglangRules
from gateway.models.experts import expert_traits
from gateway.models.rank import Rank
from gateway.models.scheme import LinearShape, MoeShape, Scheme
from gateway.planner.layer_kernels import layer_kernels
from gateway.planner.repairs import repairs
from tests.conformance import sglang_memory_questions, sglang_moe_questions
from tests.support.published import model_from_config, published_model
from tests.support.sglang_kernels import (
    ENGINES,
    PROFILES,
    RULES,
    experts,
    linear,
    moe,
    moe_choice,
    scheme_of,
)
from tests.support.versions import SGLANG, VLLM_REF

# --- dense layers ---


def kernel(version: str, k: int, n: int, capability: str = "8.6", **scheme: Any) -> KernelChoice:
    shape = LinearShape(
        k=k, n=n, scheme=Scheme(**{"kind": "wna16", "group": 128, **scheme}), dtype="bfloat16"
    )
    return choose(linear(version), shape, capability)


@pytest.mark.parametrize("version", SGLANG)
def test_seed_000_two_ranks_leave_no_tile_for_the_gates_of_a_gdn_layer(version: str) -> None:
    assert kernel(version, 2048, 64).kernel == "apply_gptq_marlin_linear"
    kernel_of_half = kernel(version, 2048, 32)
    assert kernel_of_half.status == "none"
    (refusal,) = kernel_of_half.refusals
    assert refusal.reason.startswith("N=32 is not a multiple of 64 (32 over)")


@pytest.mark.parametrize("version", SGLANG)
def test_seed_000_is_refused_as_a_whole_model(version: str) -> None:
    quantization = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "desc_act": False,
    }
    config = {
        **sglang_memory_questions.config_of("qwen3.6-35b-a3b"),
        "quantization_config": quantization,
    }
    spec = model_from_config(config, source="/models/qwen")
    layers = build(spec, ENGINES[version].traits).linears
    without = {
        tp: [
            row.layer
            for row in layer_kernels(layers, RULES[version], Rank(tp=tp, capability="8.6"))
            if row.status == "none"
        ]
        for tp in (1, 2)
    }
    assert without == {1: [], 2: ["language_model.model.layers.*.linear_attn.in_proj_ba"]}


@pytest.mark.parametrize(
    ("k", "n", "status"),
    [
        (2112, 2048, "ok"),
        (2112, 2112, "none"),
        (2880, 2880, "none"),
        (1024, 64, "ok"),
        (576, 1024, "unknown"),
    ],
)
@pytest.mark.parametrize("version", SGLANG)
def test_marlin_needs_a_tile_that_fits_both_sides_and_whole_groups(
    version: str, k: int, n: int, status: str
) -> None:
    group = 128 if k == 576 else 32
    shape = LinearShape(
        k=k, n=n, scheme=Scheme(kind="wna16", group=group), dtype="bfloat16", full_k=2 * k
    )
    assert choose(linear(version), shape, "8.6").status == status


@pytest.mark.parametrize("version", SGLANG)
def test_only_merged_modules_need_whole_blocks_each(
    version: str,
) -> None:
    scheme = Scheme(kind="fp8_block", bits=8, group=128)
    whole = LinearShape(
        k=7168, n=2112, scheme=scheme, dtype="bfloat16", full_k=7168, full_n=2112, origin="fp8"
    )
    assert choose(linear(version), whole, "9.0").kernel == "w8a8_block_fp8_matmul_deepgemm"
    merged_choice = choose(linear(version), whole._replace(parts=(1536, 576)), "9.0")
    assert merged_choice.status == "none"
    assert merged_choice.refusals[0].reason == "N=576 is not a multiple of 128 (64 over)"


# --- experts ---


@pytest.mark.parametrize("version", SGLANG)
def test_fp8_experts_crash_without_their_type_in_triton_and_no_flag_helps(
    version: str,
) -> None:
    base = sglang_moe_questions.Question("qwen3-30b-a3b", "fp8", "fp8_block", 8, 128)
    crash = moe_choice(version, base, "8.6")
    assert (crash.status, crash.kernel) == ("crash", "triton")
    assert "needs compute capability 8.9 or higher, this GPU has 8.6" in crash.note
    assert moe_choice(version, base, "8.9").status == "ok"
    traits, layer = experts("qwen3-30b-a3b")
    shape = MoeShape(hidden=layer.k, intermediate=768, experts=128, scheme=scheme_of(base),
        origin="fp8", dtype="bfloat16",
                     routing=traits.routing, family=traits.family)  # fmt: skip
    assert choose_moe(moe(version), shape, "9.0", forced_backend="deep_gemm").status == "unknown"


@pytest.mark.parametrize("version", SGLANG)
def test_weights_that_do_not_fit_whole_are_not_quantized_at_load(
    version: str,
) -> None:
    refusal = RefusalError("no_memory", "60 GiB are needed", "memory model")
    offers = {
        engine.kind: [
            variant.quantization
            for variant in repairs(
                Variant(), refusal, engine, SglangRules(), 1, (), is_quantized=False
            )
            if variant.quantization
        ]
        for engine in (ENGINES[version], PROFILES.engine(VLLM_REF))
    }
    assert offers == {"sglang": [], "vllm": ["fp8"]}


@pytest.mark.parametrize("version", SGLANG)
def test_a_family_that_was_not_asked_is_unknown(version: str) -> None:
    shape = MoeShape(hidden=2048, intermediate=768, experts=64,
        scheme=Scheme(kind="unquantized", bits=16), dtype="bfloat16",
                     routing="default", family="frob")  # fmt: skip
    assert choose_moe(moe(version), shape, "9.0").status == "unknown"


@pytest.mark.parametrize("version", SGLANG)
def test_the_rules_name_only_runners_that_they_describe_and_describe_none_in_vain(
    version: str,
) -> None:
    rules = moe(version)
    named_runners = {
        name
        for method in rules.methods
        for names in (method.backends, *method.backends_by_flag.values())
        for name in names
    }
    assert named_runners == set(rules.backends)
    paths = linear(version).paths
    assert {name for path in paths for name in path.kernels} == set(linear(version).kernels)
    assert all(bool(path.kernels) != bool(path.refuses) for path in paths)


@pytest.mark.parametrize("version", SGLANG)
def test_a_file_lists_once_the_families_that_the_engine_was_asked_about(version: str) -> None:
    families = {
        expert_traits(published_model(question.model)).family
        for question in sglang_moe_questions.questions(version)
    }
    assert families <= set(moe(version).families)
    names = {
        name for method in moe(version).methods for name in method.match.root.get("families", ())
    }
    assert names <= set(moe(version).families)
