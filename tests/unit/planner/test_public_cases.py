"""Public cases of models on machines, with what is known to happen there as the planner's answer.

Each case stands for a class; its model and machine are only the published ones.
"""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import Decision
from gateway.models.spec import read_model
from gateway.profiles.profiles import Profiles
from tests.conformance.forecast_cases import family_configs
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import config

PROFILES = Profiles()
FP8_BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}


def planned(fields: dict[str, Any], hardware: str, *engines: str, **wanted: Any) -> Decision:
    """The decision for a model of which only config.json is known."""
    spec = read_model("m", None, fields, None, None, (), None)
    allowed = PROFILES.engines(engines, device="cuda")
    return decide(
        spec,
        PROFILES.hardware(hardware),
        allowed,
        wish(**wanted),
        PROFILES.facts,
        rules=PROFILES.rules(allowed),
        pace=PROFILES.pace,
    )


# --- DeepGEMM of some vLLM wheels has no kernels for GPUs that the same wheel gives it ---


@pytest.mark.parametrize("version", ["0.24.0", "0.27.1"])
@pytest.mark.parametrize(
    ("name", "hardware"),
    [
        ("qwen3-8b", "5090"),
        ("qwen3-8b", "gb10"),
        ("qwen3-30b-a3b", "rtx-pro-6000"),
        ("qwen3-30b-a3b", "gb10"),
    ],
)
def test_deep_gemm_without_kernels_for_the_gpu_is_left_out(
    name: str, hardware: str, version: str
) -> None:
    fields = config(name, quantization_config=FP8_BLOCKS)
    decision = planned(fields, hardware, f"vllm=={version}")
    assert decision.plans, decision.rejected
    for plan in decision.plans:
        assert not [row for row in plan.kernels if "deepgemm" in (row.kernel or "").lower()]
    assert any("deep_gemm" in one.reasons[0] for one in decision.rejected)


@pytest.mark.parametrize("version", ["0.25.1", "0.26.0", "0.28.0"])
def test_deep_gemm_with_kernels_for_the_gpu_stays(version: str) -> None:
    fields = config("qwen3-8b", quantization_config=FP8_BLOCKS)
    best = planned(fields, "rtx-pro-6000", f"vllm=={version}").plans[0]
    assert "DeepGemmFp8BlockScaledMMKernel" in {row.kernel for row in best.kernels}


@pytest.mark.parametrize("version", ["0.24.0", "0.27.1"])
def test_deep_gemm_of_these_versions_stays_where_it_has_kernels(version: str) -> None:
    fields = config("qwen3-8b", quantization_config=FP8_BLOCKS)
    best = planned(fields, "2xh100", f"vllm=={version}").plans[0]
    assert any("DeepGEMM" in (row.kernel or "") for row in best.kernels)


# --- gpt-oss-120b on one H100: 64.38 GiB of weights in vLLM 0.14.1, and no room for its context ---


@pytest.mark.parametrize(
    ("version", "hardware", "weights", "whole"),
    [
        ("0.18.0", "2xh100", 64.4, False),
        ("0.19.1", "2xh100", 64.4, False),
        ("0.26.0", "2xh100", 60.8, True),
        ("0.33.0", "2xh100", 60.8, True),
        ("0.19.1", "8xa100-80g", 65.97, False),  # Marlin's own padding
    ],
)
def test_scales_that_an_old_triton_path_keeps_take_memory(
    version: str, hardware: str, weights: float, whole: bool
) -> None:
    fields = config(
        "gpt-oss-20b",
        num_hidden_layers=36,
        num_local_experts=128,
        layer_types=["sliding_attention", "full_attention"] * 18,
        quantization_config={"quant_method": "mxfp4"},
    )
    best = planned(fields, hardware, f"vllm=={version}", tensor_parallel=1).plans[0]
    assert best.memory.weights_bytes / 2**30 == pytest.approx(weights, rel=0.01)
    assert (best.max_model_len.value == 131072) == whole


# --- GLM-4.5V on eight GPUs: 12 heads of its vision tower, of which only config.json tells ---

GLM_4_5V: dict[str, Any] = {
    "architectures": ["Glm4vMoeForConditionalGeneration"],
    "model_type": "glm4v_moe",
    "text_config": {
        "model_type": "glm4v_moe_text",
        "dtype": "bfloat16",
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 65536,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "vocab_size": 151552,
    },
    "vision_config": {
        "model_type": "glm4v_moe",
        "depth": 24,
        "hidden_size": 1536,
        "intermediate_size": 10944,
        "num_heads": 12,
        "out_hidden_size": 4096,
        "patch_size": 14,
    },
}


def sizes(decision: Decision) -> set[int]:
    return {plan.tensor_parallel.value for plan in decision.plans}


def test_ranks_that_cannot_share_a_vision_tower_are_not_planned() -> None:
    assert max(sizes(planned(GLM_4_5V, "8xh100", "vllm==0.19.1"))) == 4
    refused = planned(GLM_4_5V, "8xh100", "vllm==0.19.1", tensor_parallel=8).rejected
    assert [one.verdict for one in refused] == ["illegal_parallelism"]
    assert "12 heads of its vision tower" in refused[0].reasons[0]
    assert "--arg mm-encoder-tp-mode=data" in refused[0].reasons[0]


@pytest.mark.parametrize(
    "wanted", [{"args": {"mm-encoder-tp-mode": "data"}}, {"text_only": True}], ids=["whole", "text"]
)
def test_ranks_without_a_part_of_the_tower_need_not_share_it(wanted: dict[str, Any]) -> None:
    decision = planned(GLM_4_5V, "8xh100", "vllm==0.19.1", tensor_parallel=8, **wanted)
    assert sizes(decision) == {8}


def test_towers_that_vllm_keeps_whole_by_itself_are_planned() -> None:
    fields = {**GLM_4_5V, "architectures": ["InternVLForConditionalGeneration"]}
    fields["model_type"] = "internvl"
    assert 8 in sizes(planned(fields, "8xh100", "vllm==0.19.1", tensor_parallel=8))


# --- a cache in e5m2 beside weights that come with scales for the cache ---

PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 128},
        }
    },
}


@pytest.mark.parametrize(
    ("quant", "version", "runs"),
    [
        (FP8_BLOCKS, "0.19.1", False),
        (FP8_BLOCKS, "0.33.0", False),
        (PACKED, "0.19.1", False),
        (PACKED, "0.26.0", True),
        (None, "0.33.0", True),
    ],
)
def test_a_cache_without_scales_is_refused_for_weights_with_them(
    quant: dict[str, Any] | None, version: str, *, runs: bool
) -> None:
    fields = config("qwen3-8b", quantization_config=quant)
    args = {"kv-cache-dtype": "fp8_e5m2"}
    decision = planned(fields, "4090", f"vllm=={version}", args=args)
    assert bool(decision.plans) == runs
    if not runs:
        assert all("fp8_e4m3" in one.reasons[0] for one in decision.rejected)


# --- experts that one kernel takes on few GPUs, asked for by name ---


@pytest.mark.parametrize(("hardware", "runs"), [("4xrtx-pro-6000", False), ("8xb200", True)])
@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
def test_a_kernel_of_experts_needs_its_gpu_whatever_the_scheme(
    version: str, hardware: str, runs: bool
) -> None:
    fields = family_configs()["deepseek_v4"] | {"quantization_config": FP8_BLOCKS}
    decision = planned(
        fields, hardware, f"vllm=={version}", args={"moe-backend": "deep_gemm_mega_moe"}
    )
    assert bool(decision.plans) == runs
    if not runs:
        reasons = {one.reasons[0] for one in decision.rejected if one.verdict == "no_kernel"}
        assert any("runs on compute capability 10.*" in reason for reason in reasons)


# --- figures that owners measured ---


def test_minimax_m2_on_four_cards_has_the_measured_weights_and_cache() -> None:
    fields = config("minimax-m2", quantization_config=FP8_BLOCKS)
    best = planned(fields, "4xrtx-pro-6000", "vllm==0.26.0", tensor_parallel=4).plans[0]
    assert best.memory.weights_bytes / 2**30 == pytest.approx(53.75, rel=0.01)
    assert best.memory.kv_bytes_per_token == 63488
    assert best.max_model_len.value == 196608


@pytest.mark.parametrize(("version", "whole"), [("0.19.1", True), ("0.33.0", False)])
def test_experts_of_192_columns_stay_whole_until_blocks_get_finer(
    version: str, *, whole: bool
) -> None:
    fields = config("qwen3-30b-a3b", quantization_config=FP8_BLOCKS)
    best = planned(fields, "4xl4", f"vllm=={version}", tensor_parallel=4).plans[0]
    assert best.expert_parallel.value == whole


@pytest.mark.parametrize(
    ("name", "hardware", "version", "args", "verdict"),
    [
        ("deepseek-v3.2", "rtx-pro-6000", "0.18.0", {}, "no_backend"),
        (
            "gemma-4-31b",
            "rtx-pro-6000",
            "0.19.1",
            {"attention-backend": "FLASHINFER"},
            "no_backend",
        ),
        ("gemma-4-31b", "2xh100", "0.18.0", {}, "unsupported_architecture"),
    ],
)
def test_what_owners_met_at_a_start_is_refused_before_it(
    name: str, hardware: str, version: str, args: dict[str, Any], verdict: str
) -> None:
    decision = planned(config(name), hardware, f"vllm=={version}", args=args)
    assert not decision.plans
    assert decision.rejected[0].verdict == verdict


def test_gemma_3_on_a_t4_computes_in_float32() -> None:
    best = planned(config("gemma-3-1b"), "t4", "vllm==0.26.0").plans[0]
    assert best.dtype.value == "float32"
