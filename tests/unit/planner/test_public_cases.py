"""Public reports of starts that engines refused or that ran short, as plans must foresee them.

Each outcome is the report's own, and holds for the engine's code of the planned version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest

from gateway.domain import Decision, Plan
from gateway.domain.units import GIB
from tests.conformance.layer_cases import QUANTS
from tests.support.published import config
from tests.support.versions import VLLM_REF
from tests.unit.planner.test_reported_failures import make_decision


class PublicCase(NamedTuple):
    """wanted: of the wish. holds: what the report says of the decision."""

    source: str
    fields: Mapping[str, Any]
    hardware: str
    wanted: Mapping[str, Any]
    holds: Callable[[Decision], bool]


FP8, GPTQ = QUANTS["fp8-block"], QUANTS["gptq"]
# Published shapes that differ from a kept file in these fields.
LLAMA_33B = config(
    "llama-3.1-8b", num_hidden_layers=60, hidden_size=6656, num_attention_heads=52,
    num_key_value_heads=52, intermediate_size=17920, vocab_size=32000,
)  # fmt: skip
LLAMA_13B = config(
    "llama-3.1-8b", num_hidden_layers=40, hidden_size=5120, num_attention_heads=40,
    num_key_value_heads=40, intermediate_size=13824, vocab_size=32000,
)  # fmt: skip
QWEN3_235B = config(
    "qwen3-30b-a3b", num_hidden_layers=94, hidden_size=4096, num_attention_heads=64,
    moe_intermediate_size=1536, intermediate_size=12288, quantization_config=FP8,
)  # fmt: skip
QWEN3_480B = config(
    "qwen3-30b-a3b", num_hidden_layers=62, hidden_size=6144, num_attention_heads=96,
    num_key_value_heads=8, num_experts=160, moe_intermediate_size=2560, intermediate_size=8192,
    max_position_embeddings=262144, quantization_config=FP8,
)  # fmt: skip
QWEN15_7B = config(
    "qwen2.5-7b", num_hidden_layers=32, hidden_size=4096, num_attention_heads=32,
    num_key_value_heads=32, intermediate_size=11008, vocab_size=151936,
    max_position_embeddings=32768, quantization_config=GPTQ,
)  # fmt: skip
GPT2_XL = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 1600, "n_head": 25,
    "n_layer": 48, "n_positions": 1024, "n_ctx": 1024, "vocab_size": 50257,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "torch_dtype": "float32",
}  # fmt: skip
PLAIN_CACHE = {"args": {"kv-cache-dtype": "auto"}}


def plans_of(decision: Decision, tensor_parallel: int) -> list[Plan]:
    return [plan for plan in decision.plans if plan.tensor_parallel.value == tensor_parallel]


def without(tensor_parallel: int) -> Callable[[Decision], bool]:
    """No plan of this size, and others."""
    return lambda decision: not plans_of(decision, tensor_parallel) and bool(decision.plans)


def is_refused(decision: Decision) -> bool:
    return not decision.plans


def cache_of_one(token_bytes: int, low: int, high: int) -> Callable[[Decision], bool]:
    """A plan whose cache holds so many tokens."""
    return lambda decision: any(
        low <= plan.memory.kv_bytes / token_bytes <= high for plan in decision.plans
    )


CASES = (
    PublicCase("gpustack#2259", config("gemma-3-27b"), "3x3090", {}, without(3)),
    PublicCase("AdaptThink#1", config("qwen2.5-7b"), "8xh100", {}, without(8)),
    PublicCase(
        "FSDrive#21",
        config("qwen2.5-1.5b"),
        "8xh100",
        {"args": {"tensor-parallel-size": "8"}},
        is_refused,
    ),
    PublicCase("vllm#52435", config("gpt-oss-20b"), "3x3090", {}, without(3)),
    PublicCase(
        "vllm#41695",
        config("qwen3-30b-a3b", quantization_config=FP8),
        "5090",
        {"context": 16384},
        lambda decision: all(plan.max_model_len.value < 16384 for plan in decision.plans),
    ),
    PublicCase(
        "vllm#41695, in bfloat16",
        config("qwen3.6-35b-a3b"),
        "5090",
        {"text_only": True},
        is_refused,
    ),
    PublicCase(
        "vllm#52915",
        config("qwen3.6-35b-a3b", quantization_config=FP8),
        "8xh100",
        {},
        without(8),
    ),
    PublicCase(
        "vllm#42510", config("llama-3.1-8b"), "3090", {"args": {"block-size": "8"}}, is_refused
    ),
    PublicCase(
        "vllm#21348",
        QWEN3_235B,
        "4xh100",
        {},
        lambda decision: any(6 <= one.memory.kv_bytes / GIB <= 14 for one in plans_of(decision, 4)),
    ),
    PublicCase(
        "vllm-project/recipes#12",
        QWEN3_480B,
        "8xh200",
        {"args": {"data-parallel-size": "8"}},
        lambda decision: any(
            180_000 <= plan.max_model_len.value <= 232_000 for plan in decision.plans
        ),
    ),
    PublicCase(
        "vllm#2652", LLAMA_33B, "8xh100", {"args": {"tensor-parallel-size": "8"}}, is_refused
    ),
    PublicCase("vllm#596", LLAMA_13B, "3x3090", {}, without(3)),
    PublicCase("vllm#1705", GPT2_XL, "2x3090", {}, without(2)),
    PublicCase(
        "vllm#26431",
        config("llama-3.1-8b"),
        "3090",
        {"args": {"kv-cache-dtype": "fp8"}},
        lambda decision: (
            {row.backend for plan in decision.plans for row in plan.attention} == {"FLASHINFER"}
        ),
    ),
    PublicCase(
        "zai-org/GLM-4#510", config("llama-3.1-8b"), "v100", {"dtype": "bfloat16"}, is_refused
    ),
    PublicCase("vllm#1157", config("qwen2.5-1.5b"), "t4", {"dtype": "bfloat16"}, is_refused),
    PublicCase(
        "Qwen3#16",
        QWEN15_7B,
        "3090",
        PLAIN_CACHE,
        cache_of_one(32 * 2 * 32 * 128 * 2, 22_000, 31_000),
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.source)
def test_a_plan_foresees_what_a_user_met(case: PublicCase) -> None:
    decision = make_decision(dict(case.fields), case.hardware, VLLM_REF, **case.wanted)
    assert case.holds(decision), [plan.argv for plan in decision.plans]
