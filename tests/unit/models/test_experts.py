"""The traits of experts follow config.json, and the constants of the engine's class."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.models.experts import expert_traits
from tests.support.published import published_model

LIMIT = {"swiglu_limit": 7.0}


@pytest.mark.parametrize(
    ("config", "function", "clamped"),
    [
        (
            {"model_type": "minimax_m3_vl", "text_config": {"hidden_act": "swigluoai", **LIMIT}},
            "swigluoai_uninterleave",
            True,
        ),
        ({"model_type": "deepseek_v4", "hidden_act": "silu", **LIMIT}, "silu", True),
        ({"model_type": "deepseek_v4", "hidden_act": "silu"}, "silu", False),
        ({"model_type": "gpt_oss", **LIMIT}, "swigluoai", False),
        ({"model_type": "other", "hidden_act": "swigluoai", **LIMIT}, "", False),
    ],
)
def test_a_config_names_the_activation_and_its_limit(
    config: dict[str, Any], function: str, clamped: bool
) -> None:
    traits = expert_traits(published_model("qwen3-8b").evolve(config=config))
    assert (traits.function, traits.clamped) == (function, clamped)


@pytest.mark.parametrize(
    ("config", "routing"),
    [
        ({"model_type": "ernie4_5_moe"}, "unspecified"),
        ({"model_type": "phimoe"}, "unspecified"),
        ({"model_type": "olmoe", "norm_topk_prob": True}, "default"),
        ({"model_type": "dbrx"}, "renormalize"),
        ({"model_type": "glm_moe_dsa", "n_group": 1, "norm_topk_prob": True}, "deepseek"),
        ({"model_type": "mimo_v2_flash", "n_group": 1, "norm_topk_prob": False}, ""),
        ({"model_type": "other"}, ""),
    ],
)
def test_a_class_decides_how_experts_are_chosen(config: dict[str, Any], routing: str) -> None:
    assert expert_traits(published_model("qwen3-8b").evolve(config=config)).routing == routing
