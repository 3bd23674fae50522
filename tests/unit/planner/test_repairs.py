"""Variants of a model on an engine, and changes after a refusal: one at a time, never a setting of
the user."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import Engine, Flag, Memory
from gateway.engines.common.kernels.linear import LinearRules
from gateway.engines.common.refusal import RefusalError, RepairHint, VariantEvidence
from gateway.engines.common.variant import Variant
from gateway.engines.vllm.engine import VllmRules
from gateway.planner.repairs import has, longer_variants, repairs
from tests.support.makers import engine

FLAGS: dict[str, Flag] = {
    **engine().flags,
    "pipeline-parallel-size": Flag(type="int"),
    "enable-expert-parallel": Flag(type="bool"),
    "kv-cache-dtype": Flag(type="str", choices=("auto", "fp8")),
    "quantization": Flag(type="str"),
    "linear-backend": Flag(type="str", choices=("auto", "cutlass", "marlin", "triton")),
    "moe-backend": Flag(type="str", choices=("auto", "marlin", "triton")),
}
ENGINE = engine(flags=FLAGS, user_env=("VLLM_DISABLED_KERNELS",))
RULES = VllmRules(
    linear=LinearRules(
        packages=(), backends={"marlin": ("Marlin",), "triton": ("Triton",)}, paths=(), kernels={}
    )
)


def cures(
    refusal: RefusalError,
    variant: Variant | None = None,
    *,
    engine_: Engine = ENGINE,
    gpus: int = 4,
    args: Any = (),
    quantized: bool = False,
) -> list[Variant]:
    return list(
        repairs(variant or Variant(), refusal, engine_, RULES, gpus, args, is_quantized=quantized)
    )


def changes(variants: list[Variant]) -> list[str]:
    return [name for variant in variants for name in variant.reasons]


def test_a_change_says_why_and_costs() -> None:
    variant = (
        Variant(tp=2)
        .add_change("pp", 2, "short of memory", "memory model")
        .add_change("kv_dtype", "fp8", "still short", "memory model")
    )
    assert (variant.tp, variant.pp, variant.kv_dtype) == (2, 2, "fp8")
    assert variant.reasons == {
        "pp": ("short of memory", "memory model"),
        "kv_dtype": ("still short", "memory model"),
    }
    assert variant.cost > Variant().add_change("pp", 2, "", "").cost > 0
    # Two orders of the same changes are one variant.
    assert variant == Variant(tp=2, pp=2, kv_dtype="fp8")


# --- repairs ---


def test_a_failed_plan_gets_one_conservative_try() -> None:
    refusal = RefusalError("known_bad", "it broke", "fact")
    (conservative,) = cures(refusal)
    assert conservative.conservative
    assert cures(refusal, conservative) == []


def test_a_kernel_that_fails_is_disabled_or_passed_over() -> None:
    refusal = RefusalError(
        "known_bad",
        "Marlin fails",
        "fact",
        layer="model.layers.*.mlp.down_proj",
        repair=RepairHint("Marlin"),
    )
    variants = cures(refusal)
    assert [(variant.disabled, variant.backends) for variant in variants] == [(("Marlin",), ())]
    assert "Marlin" in variants[0].reasons["disabled"][0]
    # Only backends that do not lead to the same kernel, once the engine ignores that
    # or has no other kernel by itself.
    for second in (
        refusal,
        RefusalError("no_kernel", "none", "profile", layer="model.layers.*.mlp.down_proj"),
    ):
        backend_variants = [variant for variant in cures(second, variants[0]) if variant.backends]
        assert [variant.backends for variant in backend_variants] == [
            (("linear-backend", "cutlass"),),
            (("linear-backend", "triton"),),
        ]
        assert all(
            variant.reasons["backends"][0].startswith("Marlin") for variant in backend_variants
        )
        # A stand-in that fails is not repaired: the other one is looked at anyway.
        assert not any(cures(second, variant) for variant in backend_variants)
    second_cures = cures(
        RefusalError("known_bad", "Triton fails", "fact", layer="x", repair=RepairHint("Triton")),
        variants[0],
    )
    assert second_cures[0].disabled == ("Marlin", "Triton")
    assert cures(refusal, engine_=engine()) == []


def test_the_backend_is_the_part_of_experts_that_changes() -> None:
    refusal = RefusalError(
        "runtime_fail",
        "crash",
        "profile",
        layer="model.layers.*.mlp.experts.w2",
        repair=RepairHint("MARLIN"),
    )
    variants = cures(refusal, Variant(tp=2))
    assert ("moe-backend", "triton") in {pair for variant in variants for pair in variant.backends}
    assert [variant.ep for variant in variants if variant.ep] == [True]
    assert not any(variant.disabled for variant in variants)
    # One rank holds whole experts anyway.
    assert not any(variant.ep for variant in cures(refusal, Variant(tp=1)))


def test_a_layer_without_a_kernel_may_get_one_in_float16() -> None:
    refusal = RefusalError("no_kernel", "none", "profile", layer="model.layers.*.mlp.down_proj")
    assert changes(cures(refusal)) == ["dtype"]
    assert changes(cures(refusal, args={"dtype"})) == []
    assert changes(cures(RefusalError("no_kernel", "the whole GPU is too old", "profile"))) == []


def test_short_of_memory_it_takes_smaller_caches_more_stages_or_smaller_weights() -> None:
    refusal = RefusalError(
        "no_memory", "too large", "memory model", repair=RepairHint(may_shrink_cache=True)
    )
    variants = cures(refusal)
    assert changes(variants) == ["kv_dtype", "pp", "pp", "pp", "quantization"]
    # Where the weights alone are too large, a smaller cache does not help.
    assert changes(cures(RefusalError("no_memory", "too large", "memory model"))) == [
        "pp",
        "pp",
        "pp",
        "quantization",
    ]
    assert [variant.pp for variant in variants if variant.pp > 1] == [2, 3, 4]
    assert [variant.pp for variant in cures(refusal, Variant(tp=2)) if variant.pp > 1] == [2]
    assert "quantization" not in changes(cures(refusal, quantized=True))
    assert (
        changes(cures(refusal, args={"kv-cache-dtype", "pipeline-parallel-size", "quantization"}))
        == []
    )
    assert not {"kv_dtype", "quantization"} & set(
        changes(cures(refusal, engine_=engine("cpu"), gpus=0))
    )


def test_only_the_numbers_of_stages_that_may_hold_the_weights_and_all_are_tried() -> None:
    memory = Memory(
        gpu_bytes=80, budget_bytes=70, weights_bytes=190, activation_bytes=5, graph_bytes=0,
        overhead_bytes=10, kv_bytes=0,
        kv_bytes_per_token=1, kv_tokens=0, low=0, high=0,
    )  # fmt: skip
    refusal = RefusalError(
        "no_memory", "200 are needed", "memory model", evidence=VariantEvidence(memory=memory)
    )
    assert [variant.pp for variant in cures(refusal, gpus=8) if "pp" in variant.reasons] == [
        4,
        5,
        8,
    ]
    assert [variant.pp for variant in cures(refusal, gpus=3) if "pp" in variant.reasons] == [3]


def test_the_chain_of_repairs_ends() -> None:
    refusal = RefusalError("no_memory", "too large", "memory model")
    variant = (
        Variant().add_change("kv_dtype", "fp8", "", "").add_change("conservative", True, "", "")
    )
    assert changes(cures(refusal, variant.add_change("dtype", "float16", "", ""))) == []
    # Stages lay a variant out, and are none of its three changes.
    staged_variant = variant.add_change("pp", 2, "", "")
    assert "quantization" in changes(cures(refusal, staged_variant))
    assert changes(cures(refusal, staged_variant.add_change("dtype", "float16", "", ""))) == []


@pytest.mark.parametrize(
    "verdict",
    ["untrusted_code", "unsupported_architecture", "no_device", "driver_too_old", "bad_flag"],
)
def test_a_refusal_that_no_change_can_cure_is_left(verdict: str) -> None:
    assert cures(RefusalError(verdict, "no", "profile")) == []


def test_a_flag_is_known_by_the_engines_own_name() -> None:
    engine_with_name = engine(
        flags={"tp-size": Flag(type="int")}, spelling={"tensor-parallel-size": "tp-size"}
    )
    assert has(engine_with_name, "tensor-parallel-size")
    assert not has(engine_with_name, "max-model-len")


# --- a short context ---


def longer(
    variant: Variant,
    context: int = 9000,
    *,
    gpus: int = 1,
    args: Any = (),
    engine_: Engine = ENGINE,
) -> list[str]:
    """The change of each variant that may have a longer context than this one."""
    variants = longer_variants(variant, context, 32_768, engine_, gpus, args)
    return [
        name
        for longer_variant in variants
        for name in longer_variant.reasons
        if name not in variant.reasons
    ]


def test_a_longer_context_costs_one_feature_after_the_other_and_a_long_one_none() -> None:
    fewer = Variant().add_change("small", True, "short", "memory model")
    half = fewer.add_change("kv_dtype", "fp8", "short", "memory model")
    assert longer(Variant(), 32_768) == []
    assert longer(Variant()) == ["small"]
    assert longer(fewer) == ["kv_dtype", "eager"]
    assert longer(half) == ["eager"]
    assert longer(half.add_change("eager", True, "short", "memory model")) == []
    assert longer(Variant(), gpus=2) == ["small", "pp"]
    staged_variant = Variant(pp=2)
    assert longer(staged_variant, gpus=3) == ["small", "pp"]
    assert longer(staged_variant.add_change("layers", (20, 12), "unlike", "planner"), gpus=3) == [
        "small"
    ]
    assert longer(fewer, gpus=2) == ["kv_dtype", "eager"]


def test_the_users_settings_are_not_given_up() -> None:
    assert longer(Variant(), args={"max-num-seqs"}) == ["kv_dtype", "eager"]
    assert longer(Variant(), args={"max-num-seqs", "kv-cache-dtype", "enforce-eager"}) == []
    assert (
        longer(
            Variant(),
            gpus=4,
            args={"max-num-seqs", "kv-cache-dtype", "enforce-eager", "pipeline-parallel-size"},
        )
        == []
    )


def test_each_stage_takes_as_many_gpus_as_divide_the_heads() -> None:
    refusal = RefusalError(
        "illegal_parallelism",
        "64 attention heads cannot be shared by 6 GPUs",
        "vllm/config/model.py",
    )
    variants = cures(refusal, Variant(tp=6), gpus=6)
    assert [(variant.tp, variant.pp) for variant in variants] == [(3, 2), (2, 3), (1, 6)]
    assert cures(refusal, Variant(tp=3), gpus=6) == []
    assert cures(refusal, Variant(tp=6), gpus=6, args={"tensor-parallel-size"}) == []


def test_a_repair_of_a_measured_shortage_is_conservative_first() -> None:
    memory = Memory(
        gpu_bytes=24, budget_bytes=20, weights_bytes=16, activation_bytes=5, graph_bytes=0,
        overhead_bytes=1, kv_bytes=0,
        kv_bytes_per_token=1, kv_tokens=0, low=17, high=22,
    )  # fmt: skip
    short = VariantEvidence(memory=memory)
    estimate = RefusalError("no_memory", "22 GiB are needed", "memory model", evidence=short)
    evidence = RefusalError("no_memory", "22 GiB were needed here", "fact", evidence=short)
    assert changes(cures(estimate, gpus=1, quantized=True)) == ["small"]
    assert changes(cures(evidence, gpus=1, quantized=True)) == ["conservative"]
    large = RefusalError(
        "no_memory",
        "30 GiB are needed",
        "memory model",
        evidence=VariantEvidence(memory=memory.evolve(weights_bytes=28)),
    )
    assert changes(cures(large, gpus=1, quantized=True)) == []
