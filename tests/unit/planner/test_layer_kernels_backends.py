"""Backends of experts that --moe-backend alone chooses, and those that no rule describes."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.engines.common.kernels.expert_kernels import MoeChoice, MoeRules, choose_moe
from gateway.engines.common.rules.variable_effects import rule_variables
from gateway.models.scheme import MoeShape, Scheme
from tests.conformance.layer_cases import QUANTS
from tests.support.engine_rules import read_rules
from tests.support.published import config
from tests.support.reported_plans import make_decision

NVFP4 = config("qwen3-30b-a3b", quantization_config=QUANTS["nvfp4"])
W4A16 = config(
    "qwen3-30b-a3b",
    quantization_config=QUANTS["nvfp4"]
    | {
        "config_groups": {
            "group_0": QUANTS["nvfp4"]["config_groups"]["group_0"] | {"input_activations": None}
        }
    },
)
MXFP4 = config("gpt-oss-20b", quantization_config=QUANTS["mxfp4"])


@pytest.mark.parametrize(
    ("fields", "version", "forced", "kernel"),
    [
        (NVFP4, "0.26.0", "flashinfer_b12x", "FLASHINFER_B12X"),
        (NVFP4, "0.33.0", "flashinfer_b12x", "FLASHINFER_B12X"),
        (NVFP4, "0.33.0", "b12x", "B12X"),
        (W4A16, "0.33.0", "flashinfer_b12x", "FLASHINFER_B12X"),
        (W4A16, "0.33.0", "b12x", "B12X"),
    ],
)
def test_b12x_computes_fp4_experts_on_rtx_pro_6000(
    fields: dict[str, Any], version: str, forced: str, kernel: str
) -> None:
    best = make_decision(
        fields, "rtx-pro-6000", f"vllm=={version}", args={"moe-backend": forced}
    ).plans[0]
    assert kernel in {row.kernel for row in best.kernels}


@pytest.mark.parametrize("hardware", ["h200", "8xb200"])
def test_b12x_is_only_for_compute_capability_12(hardware: str) -> None:
    decision = make_decision(
        NVFP4, hardware, "vllm==0.33.0", args={"moe-backend": "b12x"}, tensor_parallel=1
    )
    assert not decision.plans
    assert "runs on compute capability 12.*" in decision.rejected[0].reasons[0]


def test_a_backend_that_no_rule_describes_is_unknown_and_not_refused() -> None:
    best = make_decision(MXFP4, "rtx-pro-6000", "vllm==0.33.0", args={"moe-backend": "b12x"}).plans[
        0
    ]
    experts = [row for row in best.kernels if row.scheme != "unquantized"]
    assert {row.status for row in experts} == {"unknown"}
    assert "do not describe --moe-backend b12x" in experts[0].refusals[0].reason


def choose_experts(version: str, forced: str | None, *variables: str, **shape: Any) -> MoeChoice:
    """The choice for experts on a GPU of 12.0."""
    experts = MoeShape(2048, 768, 128, dtype="bfloat16", routing="renormalize", **shape)
    rules = read_rules(MoeRules, "moe", version)
    return choose_moe(rules, experts, "12.0", None, forced, frozenset(variables))


@pytest.mark.parametrize(
    ("version", "forced", "shape", "status"),
    [
        # B12xExperts.is_supported_config, fused_moe/b12x.py:453 of 0.33.0
        ("0.33.0", "b12x", {"bias": True}, "none"),
        ("0.33.0", "b12x", {"function": "swigluoai_uninterleave"}, "none"),
        ("0.33.0", "b12x", {"function": "silu", "clamped": True}, "ok"),
        # NVFP4_BACKENDS_WITH_CLAMP, fused_moe/oracle/nvfp4.py
        ("0.33.0", "flashinfer_b12x", {"clamped": True}, "none"),
        ("0.26.0", "flashinfer_b12x", {"clamped": True}, "none"),
        ("0.26.0", "flashinfer_b12x", {}, "ok"),
    ],
)
def test_b12x_refuses_experts_that_its_code_refuses(
    version: str, forced: str, shape: dict[str, Any], status: str
) -> None:
    scheme = Scheme(kind="nvfp4", group=16)
    assert (
        choose_experts(version, forced, scheme=scheme, origin="modelopt", **shape).status == status
    )


def test_b12x_computes_split_activations_of_weights_alone() -> None:
    split = {"function": "swigluoai_uninterleave", "origin": "compressed-tensors"}
    lone_scheme = Scheme(kind="nvfp4", group=16, weight_only=True)
    assert choose_experts("0.33.0", "b12x", scheme=lone_scheme, **split).status == "ok"
    scheme = Scheme(kind="nvfp4", group=16)
    variable = "VLLM_B12X_MOE_FP4_FORCE_A16"
    assert choose_experts("0.33.0", "b12x", variable, scheme=scheme, **split).status == "ok"


@pytest.mark.parametrize(
    ("forced", "variables", "kernel"),
    [
        (None, {}, "TRITON"),
        ("deep_gemm", {}, "DEEPGEMM"),
        (None, {"VLLM_USE_DEEP_GEMM": "1"}, "DEEPGEMM"),
        (None, {"VLLM_MOE_USE_DEEP_GEMM": "1"}, "DEEPGEMM"),
        (None, {"VLLM_MOE_USE_DEEP_GEMM": "0"}, "TRITON"),
    ],
)
def test_a_family_without_deep_gemm_gets_it_by_name(
    forced: str | None, variables: dict[str, str], kernel: str
) -> None:
    """select_fp8_moe_backend, fused_moe/oracle/fp8.py:484 of 0.33.0: the exclusion is the last."""
    choice = choose_experts(
        "0.33.0",
        forced,
        *rule_variables(variables),
        scheme=Scheme(kind="fp8_block"),
        origin="fp8",
        family="qwen3_5_moe_text",
    )
    assert choice.kernel == kernel
