"""Environment variables of the engine that choose kernels: followed, or said to be unknown."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import Plan
from tests.conformance.layer_cases import QUANTS
from tests.support.published import config
from tests.support.reported_plans import make_decision

# FP8 and MXFP4 experts, as published checkpoints have them.
FP8_EXPERTS = config("qwen3-30b-a3b", quantization_config=QUANTS["fp8-block"])
NVFP4_EXPERTS = config("qwen3-30b-a3b", quantization_config=QUANTS["nvfp4"])
MXFP4_EXPERTS = config("gpt-oss-20b", quantization_config=QUANTS["mxfp4"])
FP8_DENSE = config("qwen3-8b", quantization_config=QUANTS["fp8-block"])
NVFP4_DENSE = config("qwen3-8b", quantization_config=QUANTS["nvfp4"])
FP8_TENSOR_DENSE = config("qwen3-8b", quantization_config=QUANTS["fp8-static"])


def kernels(fields: dict[str, Any], hardware: str, version: str, **env: str) -> set[str | None]:
    """The kernels of the quantized layers; empty: no plan."""
    decision = make_decision(fields, hardware, f"vllm=={version}", env=env)
    return (
        {row.kernel for row in decision.plans[0].kernels if row.scheme != "unquantized"}
        if decision.plans
        else set()
    )


@pytest.mark.parametrize(
    ("fields", "hardware", "version", "env", "kernel"),
    [
        # vllm/model_executor/layers/fused_moe/oracle/mxfp4.py of 0.19.1
        (MXFP4_EXPERTS, "h200", "0.19.1", {}, "TRITON"),
        (MXFP4_EXPERTS, "h200", "0.19.1", {"VLLM_MXFP4_USE_MARLIN": "1"}, "MARLIN"),
        (MXFP4_EXPERTS, "h200", "0.22.0", {"VLLM_MXFP4_USE_MARLIN": "1"}, "MARLIN"),
        (
            MXFP4_EXPERTS,
            "h200",
            "0.19.1",
            {"VLLM_USE_FLASHINFER_MOE_MXFP4_BF16": "1"},
            "FLASHINFER_CUTLASS_MXFP4_BF16",
        ),
        # oracle/nvfp4.py of 0.19.1
        (NVFP4_EXPERTS, "rtx-pro-6000", "0.19.1", {}, "FLASHINFER_CUTLASS"),
        (
            NVFP4_EXPERTS,
            "rtx-pro-6000",
            "0.19.1",
            {"VLLM_USE_FLASHINFER_MOE_FP4": "0"},
            "VLLM_CUTLASS",
        ),
        (
            NVFP4_EXPERTS,
            "8xb200",
            "0.19.1",
            {"VLLM_USE_FLASHINFER_MOE_FP4": "1", "VLLM_FLASHINFER_MOE_BACKEND": "throughput"},
            "FLASHINFER_CUTLASS",
        ),
        (NVFP4_EXPERTS, "5090", "0.26.0", {"VLLM_TEST_FORCE_FP8_MARLIN": "1"}, "MARLIN"),
        # oracle/fp8.py of 0.26.0 and 0.33.0
        (FP8_EXPERTS, "8xb200", "0.33.0", {"VLLM_USE_DEEP_GEMM": "1"}, "DEEPGEMM"),
        (FP8_EXPERTS, "h200", "0.26.0", {"VLLM_TEST_FORCE_FP8_MARLIN": "1"}, "MARLIN"),
        # utils/deep_gemm.py of 0.33.0, kernels/linear/scaled_mm/marlin.py of 0.26.0
        (FP8_DENSE, "8xb200", "0.33.0", {}, "DeepGemmFp8BlockScaledMMKernel"),
        (
            FP8_DENSE,
            "8xb200",
            "0.33.0",
            {"VLLM_USE_DEEP_GEMM": "0"},
            "CutlassFp8BlockScaledMMKernel",
        ),
        (
            FP8_TENSOR_DENSE,
            "h200",
            "0.26.0",
            {"VLLM_TEST_FORCE_FP8_MARLIN": "1"},
            "MarlinFP8ScaledMMLinearKernel",
        ),
        # quantization/utils/nvfp4_utils.py of 0.19.1
        (NVFP4_DENSE, "5090", "0.19.1", {}, "flashinfer-cutlass"),
        (NVFP4_DENSE, "5090", "0.19.1", {"VLLM_NVFP4_GEMM_BACKEND": "marlin"}, "marlin"),
        (NVFP4_DENSE, "5090", "0.19.1", {"VLLM_NVFP4_GEMM_BACKEND": "cutlass"}, "cutlass"),
    ],
)
def test_the_plan_follows_variables_that_choose_kernels(
    fields: dict[str, Any], hardware: str, version: str, env: dict[str, str], kernel: str
) -> None:
    assert kernel in kernels(fields, hardware, version, **env)


@pytest.mark.parametrize(
    ("fields", "hardware", "version", "env", "reason"),
    [
        (FP8_EXPERTS, "l40s", "0.33.0", {"VLLM_USE_DEEP_GEMM": "1"}, "DEEPGEMM"),
        (
            MXFP4_EXPERTS,
            "5090",
            "0.19.1",
            {"VLLM_USE_FLASHINFER_MOE_MXFP4_BF16": "1"},
            "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16=1: is for compute capability 9.0 and 10.*",
        ),
    ],
)
def test_a_variable_beyond_the_gpu_refuses_the_plan(
    fields: dict[str, Any], hardware: str, version: str, env: dict[str, str], reason: str
) -> None:
    decision = make_decision(fields, hardware, f"vllm=={version}", env=env)
    assert not decision.plans
    assert decision.rejected[0].verdict == "no_kernel"
    assert reason in decision.rejected[0].reasons[0]


def first_plan(version: str, **env: str) -> Plan:
    return make_decision(config("qwen3-30b-a3b"), "h200", f"vllm=={version}", env=env).plans[0]


def test_a_flag_wins_over_a_variable() -> None:
    decision = make_decision(
        MXFP4_EXPERTS,
        "h200",
        "vllm==0.19.1",
        env={"VLLM_MXFP4_USE_MARLIN": "1"},
        args={"moe-backend": "triton"},
    )
    assert "TRITON" in {row.kernel for row in decision.plans[0].kernels}


def test_a_variable_that_no_rule_follows_brings_a_warning() -> None:
    assert any(
        "VLLM_MLA_DISABLE may change kernels or memory of vllm==0.33.0" in warning
        for warning in first_plan("0.33.0", VLLM_MLA_DISABLE="1").warnings
    )
    # These leave kernels as they are.
    quiet = {"VLLM_DEEP_GEMM_WARMUP": "skip", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    assert not first_plan("0.33.0", **quiet).warnings


def test_graphs_outside_of_the_budget_leave_more_for_the_cache() -> None:
    name = "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"
    usual, outside = first_plan("0.33.0"), first_plan("0.33.0", **{name: "0"})
    assert outside.memory.kv_bytes > usual.memory.kv_bytes
    assert first_plan("0.33.0", **{name: "1"}).memory.kv_bytes == usual.memory.kv_bytes


def test_the_first_runner_counts_graphs_where_the_second_is_switched_off() -> None:
    dense = config("llama-3.1-8b")
    usual, first = (
        make_decision(dense, "h200", "vllm==0.26.0", env=env).plans[0].memory
        for env in ({}, {"VLLM_USE_V2_MODEL_RUNNER": "0"})
    )
    assert first.kv_bytes != usual.kv_bytes
