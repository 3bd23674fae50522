"""Plans of checkpoints whose quantization stands in hf_quant_config.json alone."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import Decision, ModelSpec, Plan
from gateway.engines.vllm.kv_dtype import adopted_dtype
from gateway.models.quantization_block import FILE
from gateway.models.spec import add_quant_files
from gateway.models.tensor import Tensor
from gateway.profiles.profiles import Profiles
from tests.support.makers import machine, wish
from tests.support.planning import decide
from tests.support.published import config, model_from_config
from tests.support.versions import SGLANG_REF, VLLM_REF

PROFILES = Profiles()
GB = 10**9
LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
QWEN3_235B = {
    "hidden_size": 4096,
    "head_dim": 128,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
    "num_key_value_heads": 4,
}


def modelopt(algorithm: str, *excluded: str, **more: Any) -> dict[str, Any]:
    inner = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", **more}
    return {
        "producer": {"name": "modelopt", "version": "0.33.0"},
        "quantization": {**inner, "exclude_modules": [*excluded]},
    }


def model(name: str, file: dict[str, Any] | None, **changes: Any) -> ModelSpec:
    spec = model_from_config(config(name, **changes), source=name)
    return spec if file is None else add_quant_files(spec, {FILE: file})


def decision(spec: ModelSpec, hardware: str, engine: str, **wishes: Any) -> Decision:
    engines = [PROFILES.engine(engine)]
    return decide(spec, machine(hardware), engines, wish(**wishes), rules=PROFILES.rules(engines))


def first(spec: ModelSpec, hardware: str, engine: str = VLLM_REF) -> Plan:
    return decision(spec, hardware, engine).plans[0]


def test_experts_in_fp4_fit_two_workstation_cards() -> None:
    gates = [f"model.layers.{number}.mlp.gate" for number in range(94)]
    file = modelopt("NVFP4", *gates, "lm_head", group_size=16)
    plan = first(model("qwen3-30b-a3b", file, **QWEN3_235B), "2xrtx-pro-6000")
    assert plan.tensor_parallel.value == 2
    assert 66 * GB < plan.memory.weights_bytes < 68 * GB
    assert (plan.quantization.value, plan.quantization.source) == ("modelopt", FILE)
    assert (plan.kv_cache_dtype.value, plan.kv_cache_dtype.source) == ("fp8_e4m3", FILE)
    schemes = {row.layer.rpartition(".")[2]: row.scheme for row in plan.kernels}
    assert (schemes["w13"], schemes["qkv_proj"], schemes["gate"]) == (
        "nvfp4",
        "nvfp4",
        "unquantized",
    )


@pytest.mark.parametrize("engine", [VLLM_REF, SGLANG_REF])
def test_fp8_takes_half_the_bytes_without_a_warning_about_accuracy(engine: str) -> None:
    half, whole = (
        decision(
            model("llama-3.1-8b", file, **LLAMA_70B), "8xh100", engine, tensor_parallel=8
        ).plans[0]
        for file in (modelopt("FP8", "lm_head"), None)
    )
    linears = half.memory.weights_bytes / whole.memory.weights_bytes
    assert 0.5 < linears < 0.52
    assert not any("accuracy" in warning for warning in half.warnings)
    assert not any(word.startswith("--quantization") for word in half.argv)
    assert half.kv_cache_dtype.value == "fp8_e4m3"


def test_a_block_without_the_name_of_its_producer_is_refused_with_the_reason() -> None:
    file = modelopt("FP8", "lm_head")
    del file["producer"]
    outcome = decision(model("llama-3.1-8b", file), "2xh100", VLLM_REF)
    assert not outcome.plans
    assert outcome.rejected[0].verdict == "unsupported_quantization"
    assert "takes the weights for unquantized" in outcome.rejected[0].reasons[0]
    assert decision(model("llama-3.1-8b", file), "2xh100", SGLANG_REF).plans


def test_weights_of_old_programs_need_the_users_flag() -> None:
    content = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
    spec = add_quant_files(model("llama-3.1-8b", None), {"quant_config.json": content})
    outcome = decision(spec, "3090", VLLM_REF)
    assert not outcome.plans
    assert "--arg quantization=awq" in outcome.rejected[0].reasons[0]
    plan = decision(spec, "3090", VLLM_REF, args={"quantization": "awq"}).plans[0]
    assert plan.memory.weights_bytes < 7 * GB


def test_a_cache_that_an_engine_quantizes_for_one_model_is_planned_so() -> None:
    """GLM-5 on Blackwell: the engine's own default, which no checkpoint declares."""
    engine = PROFILES.engine(VLLM_REF)
    spec = model("deepseek-v3.2", None, architectures=["GlmMoeDsaForCausalLM"])
    for capability, dtype in (("10.0", "fp8_e4m3"), ("9.0", "auto"), (None, "auto")):
        assert adopted_dtype(spec, engine, capability) == dtype
    assert adopted_dtype(model("deepseek-v3.2", None), engine, "10.0") == "auto"


def fp8_headers(name: str) -> dict[str, Tensor]:
    """Tensors of a small FP8 checkpoint of ModelOpt."""
    layer = f"model.layers.0.mlp.{name}_proj"
    return {
        f"{layer}.weight": Tensor("F8_E4M3", (64, 64)),
        f"{layer}.weight_scale": Tensor("F32", ()),
        f"{layer}.input_scale": Tensor("F32", ()),
    }


def test_quantized_headers_are_quantized_by_the_file_and_never_once_more() -> None:
    spec = model_from_config(config("llama-3.1-8b"), tensors=fp8_headers("up"), file_bytes=8 * GB)
    quantized_spec = add_quant_files(spec, {FILE: modelopt("FP8", "lm_head")})
    plan = first(quantized_spec, "3090")
    assert plan.quantization.value == "modelopt"
    assert not any(word.startswith("--quantization") for word in plan.argv)
    outcome = decision(spec, "3090", VLLM_REF)
    assert not outcome.plans
    assert {row.verdict for row in outcome.rejected} == {"unsupported_quantization"}
    assert "neither config.json nor hf_quant_config.json" in outcome.rejected[0].reasons[0]
