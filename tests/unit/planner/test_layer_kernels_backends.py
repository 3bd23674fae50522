"""Backends of experts that --moe-backend alone chooses, and those that no rule describes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.layer_cases import QUANTS
from tests.support.published import config
from tests.unit.planner.test_reported_failures import make_decision

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
def test_b12x_is_for_12_x_alone(hardware: str) -> None:
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
    assert "do not describe --moe-backend b12x" in experts[0].refused[0].reason
