"""Every kernel and attention backend of a plan has its reason, and the tables show it."""

from __future__ import annotations

from functools import cache

import pytest

from gateway.domain import Decision
from gateway.planner.layer_tables import attention_table, kernel_table
from gateway.profiles.profiles import Profiles
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import published_model

PROFILES = Profiles()
MODELS = (
    "llama-3.1-8b",
    "gpt-oss-20b",
    "gemma-3-27b",
    "deepseek-v3",
    "qwen3-next-80b-a3b",
    "qwen3-vl-8b",
    "nemotron-nano-9b-v2",
    "bge-m3",
    "minimax-m2",
    "granite-4.0-h-small",
    "llama-3.1-8b+awq",
    "qwen3-30b-a3b+awq",
)

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


@cache
def decision(model: str, machine: str, flag: tuple[str, str] | None = None) -> Decision:
    engines = PROFILES.engines(device="cuda")
    flag_wish = wish(args=dict([flag] if flag else []))
    name, _, quantization = model.partition("+")
    spec = published_model(name, quantization_config=AWQ if quantization else None)
    return decide(
        spec,
        PROFILES.hardware(machine),
        engines,
        flag_wish,
        rules=PROFILES.rules(engines),
    )


@pytest.mark.parametrize("machine", ["8xh100", "4x3090", "8xb200"])
def test_every_choice_of_a_kernel_or_backend_has_a_reason(machine: str) -> None:
    plans = [plan for model in MODELS for plan in decision(model, machine).plans]
    rows = [row for plan in plans for row in plan.attention if row.backend]
    assert {row.kind for row in rows} >= {"full", "sliding", "encoder", "recurrent", "vision"}
    kernels = [row for plan in plans for row in plan.kernels if row.kernel]
    assert {row.scheme for row in kernels} > {"unquantized"}
    assert [row for row in rows if not row.reason] == []
    assert [row for row in kernels if not row.reason] == []
    for plan in plans:
        tables = (kernel_table(plan.kernels), attention_table(plan.attention))
        reasons = {row.reason for row in plan.attention} | {row.reason for row in plan.kernels}
        notes = " ".join(note for table in tables for note in table.notes)
        assert all(reason.replace("LinearKernel", "") in notes for reason in reasons)


def test_a_reason_names_the_order_or_the_flag_of_a_user() -> None:
    (row,) = decision("llama-3.1-8b", "h100").plans[0].attention
    assert row.reason.startswith("the first in the engine's order that takes these layers: FLASH")
    assert row.reason.endswith("in version 3 for compute capability 9.0")
    flag = ("attention-backend", "FLASHINFER")
    (row,) = decision("llama-3.1-8b", "h100", flag).plans[0].attention
    assert row.reason == "`--attention-backend FLASHINFER` names it"
