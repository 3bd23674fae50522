"""Public cases of models on machines, with what is known to happen there as the planner's answer.

Each case stands for a class; its model and machine are only the published ones.
"""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import Decision
from gateway.models.spec import read_model
from gateway.profiles.profiles import Profiles
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
