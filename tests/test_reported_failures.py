"""Five failures that users reported, as what the planner must foresee; each with cases beside it that must stay possible.

Where something was never run on that hardware, the plan says "predicted".
"""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.plan import decide
from gateway.core.reading import read_model
from gateway.domain import Decision, LayerKernel, Rejected
from gateway.profiles import Profiles
from tests.conformance.layer_cases import QUANTS
from tests.makers import wish
from tests.published import config

pytestmark = pytest.mark.unit

PROFILES = Profiles()


def planned(fields: dict[str, Any], hardware: str, *engines: str, **wanted: Any) -> Decision:
    """The decision for a model of which only config.json is known."""
    spec = read_model("m", None, fields, None, None, (), None)
    allowed = PROFILES.engines(engines, device="cuda")
    rules = PROFILES.rules(allowed)
    return decide(spec, PROFILES.hardware(hardware), allowed, wish(**wanted), PROFILES.facts, rules=rules)


def refused(decision: Decision, tensor_parallel: int) -> Rejected:
    return next(one for one in decision.rejected if one.tensor_parallel == tensor_parallel)


def row(rows: tuple[LayerKernel, ...], layer: str) -> LayerKernel:
    return next(one for one in rows if one.layer.endswith(layer))


# --- two RTX 3090, Qwen3.6-35B-A3B in 4-bit integers by AutoRound: github.com/vllm-project/vllm/issues/40354 ---

QWEN36 = config("qwen3.6-35b-a3b", quantization_config=QUANTS["auto-round-language"])


def test_vllm_0_19_cannot_cut_the_gates_of_qwen36_in_two() -> None:
    decision = planned(QWEN36, "2x3090", "vllm==0.19.1")
    two = refused(decision, 2)
    assert (two.verdict, two.layer) == ("no_kernel", "language_model.model.layers.*.linear_attn.in_proj_ba")
    gates = row(two.kernels, "in_proj_ba")
    assert (gates.k, gates.n, gates.kernel) == (2048, 32, None)
    passed = {one.kernel.removesuffix("LinearKernel"): one.reason for one in gates.refused}
    assert set(passed) == {"CutlassW4A8", "Machete", "AllSpark", "Marlin", "Conch", "Exllama"}
    assert "N=32 is not a multiple of 64" in passed["Marlin"]
    assert "float16" in passed["Exllama"]
    assert "conch is not installed" in passed["Conch"]
    best = decision.plans[0]
    assert (best.tensor_parallel.value, best.replicas.value, best.verdict) == (1, 2, "ok")
    assert best.max_model_len.value == 32768


def test_newer_vllm_keeps_those_gates_whole_and_older_ways_rank_behind() -> None:
    decision = planned(QWEN36, "2x3090", "vllm==0.26.0", "vllm==0.19.1", tensor_parallel=2)
    best = decision.plans[0]
    assert str(best.engine) == "vllm==0.26.0"
    assert best.tensor_parallel.value == 2
    assert row(best.kernels, "in_proj_ba").n == 64
    assert not best.custom_all_reduce.value
    assert "--disable-custom-all-reduce" in best.argv
    # With 0.19.1 only float16 activations give the gates a kernel, which nobody has run.
    assert all(plan.dtype.value == "float16" for plan in decision.plans if str(plan.engine) == "vllm==0.19.1")


def test_another_engine_does_not_cure_a_tile() -> None:
    decision = planned(QWEN36, "2x3090", "sglang==0.5.10.post1", tensor_parallel=2)
    assert not decision.plans
    assert decision.rejected[0].verdict in ("no_kernel", "unsupported_quantization")


def test_gemma_4_in_the_same_format_loads_on_two_cards() -> None:
    gemma = config("gemma-4-31b", quantization_config=QUANTS["auto-round-language"])
    assert planned(gemma, "2x3090", "vllm==0.19.1", tensor_parallel=2).plans


def test_hopper_is_judged_by_its_own_kernels() -> None:
    decision = planned(QWEN36, "8xh100", "vllm==0.19.1")
    qkv = row(decision.plans[0].kernels, "self_attn.qkv_proj")
    assert qkv.kernel == "MacheteLinearKernel"


# --- RTX PRO 6000, a gpt-oss-20b stored as compressed-tensors MXFP4: github.com/vllm-project/vllm/issues/38022 ---

GPT_OSS_CT = config("gpt-oss-20b", quantization_config=QUANTS["mxfp4-ct"])


@pytest.mark.parametrize("tp", [1, 2])
def test_packed_mxfp4_experts_of_2880_load_and_would_crash(tp: int) -> None:
    decision = planned(GPT_OSS_CT, "rtx-pro-6000" if tp == 1 else "2x4090", "vllm==0.18.0", tensor_parallel=tp)
    assert not decision.plans
    one = refused(decision, tp)
    assert one.verdict == "runtime_fail"
    assert "would crash at the first request" in one.reasons[0]
    down = row(one.kernels, "experts.w2")
    assert (down.k, down.n, down.status) == (2880 // tp, 2880, "crash")
    if tp == 1:
        assert "2880" in down.note
        assert "64 over" in down.note


def test_the_native_format_of_the_same_model_is_padded_and_runs() -> None:
    native = config("gpt-oss-20b", quantization_config=QUANTS["mxfp4"])
    for engine in ("vllm==0.19.1", "vllm==0.26.0", "vllm==0.33.0"):
        assert planned(native, "rtx-pro-6000", engine).plans, engine
    assert planned(config("gpt-oss-20b"), "rtx-pro-6000", "vllm==0.18.0").plans  # 42 GB of bf16 fit


# --- dense layers of 2112 inputs in 4 bits: github.com/vllm-project/vllm/pull/43731 ---

ODD = config(
    "llama-3.1-8b",
    intermediate_size=2112,
    quantization_config={**QUANTS["w4a16"], "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}}}},
)  # fmt: skip


@pytest.mark.parametrize("hardware", ["2x3090", "2xa100-40g"])
def test_a_tile_that_old_marlin_refuses_new_marlin_takes(hardware: str) -> None:
    old = planned(ODD, hardware, "vllm==0.19.1", tensor_parallel=1, dtype="bfloat16")
    assert refused(old, 1).verdict == "no_kernel"
    assert "K=2112 is not a multiple of 128" in refused(old, 1).reasons[0]
    new = planned(ODD, hardware, "vllm==0.26.0", tensor_parallel=1).plans[0]
    assert row(new.kernels, "mlp.down_proj").kernel == "MarlinLinearKernel"


def test_act_order_is_never_given_to_a_kernel_that_ignores_it() -> None:
    ordered = config("llama-3.1-8b", intermediate_size=2112, quantization_config={**QUANTS["gptq-act-order"], "group_size": 32})
    for engine in ("vllm==0.19.1", "vllm==0.26.0", "vllm==0.33.0"):
        decision = planned(ordered, "2x3090", engine, tensor_parallel=1)
        rows = [one for plan in decision.plans for one in plan.kernels]
        assert not [one for one in rows if one.kernel and "Triton" in one.kernel]


# --- DGX Spark, --quantization fp8 on vLLM 0.18.0: github.com/vllm-project/vllm/issues/40934 ---

FP8 = {"quantization": "fp8", "kv-cache-dtype": "fp8_e4m3", "enforce-eager": True, "gpu-memory-utilization": 0.2}


def test_a_kernel_that_is_known_to_fail_on_the_gb10_is_left_out() -> None:
    decision = planned(config("qwen3.5-9b"), "gb10", "vllm==0.18.0", args={**FP8, "max-model-len": 8192})
    bad = decision.rejected[0]
    assert bad.verdict == "known_bad"
    assert "CutlassFP8ScaledMMLinearKernel" in bad.reasons[0]
    assert "issues/40934" in bad.reasons[0]
    best = decision.plans[0]
    assert best.env["VLLM_DISABLED_KERNELS"] == "CutlassFP8ScaledMMLinearKernel"
    assert "CutlassFP8ScaledMMLinearKernel" in best.kernel_overrides.value
    assert all(one.kernel != "CutlassFP8ScaledMMLinearKernel" for one in best.kernels)
    assert "--gpu-memory-utilization=0.2" in best.argv


def test_the_same_model_without_fp8_and_the_same_fp8_elsewhere_are_left_alone() -> None:
    plain = planned(config("qwen3.5-9b"), "gb10", "vllm==0.18.0").plans[0]
    assert "VLLM_DISABLED_KERNELS" not in plain.env
    elsewhere = planned(config("qwen3.5-9b"), "rtx-pro-6000", "vllm==0.18.0", args={"quantization": "fp8"}).plans[0]
    assert "VLLM_DISABLED_KERNELS" not in elsewhere.env
