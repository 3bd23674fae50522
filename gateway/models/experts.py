"""Traits of a model's experts in config.json: quantization method, activation, routing. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.domain import ModelSpec
from gateway.domain.record import FrozenRecord

# The activation between the two products, where the engine's class of the family fixes it.
# Source: models/gpt_oss.py, gemma4.py, nemotron_h.py, minimax_m3/nvidia/model.py of 0.33.0.
_FUNCTIONS = {
    "gpt_oss": "swigluoai",
    "gemma4": "gelu_tanh",
    "gemma4_text": "gelu_tanh",
    "nemotron_h": "relu2_no_mul",
    "minimax_m3_vl": "swigluoai_uninterleave",
    "minimax_m3_vl_text": "swigluoai_uninterleave",
    "minimax_m3_text": "swigluoai_uninterleave",
}
# Families whose class gives the experts its limit of the activation (`swiglu_limit`).
_CLAMPED_FAMILIES = {"deepseek_v4", "minimax_m3_vl", "minimax_m3_vl_text", "minimax_m3_text"}
# Families whose router always renormalizes. Those in _CONFIGURED_FAMILIES follow `norm_topk_prob`.
_RENORMALIZED_FAMILIES = {
    "dbrx",
    "gpt_oss",
    "mixtral",
    "gemma4",
    "gemma4_text",
    "granitemoe",
    "granitemoehybrid",
    "granitemoeshared",
    "qwen3_5_moe_text",
}
# Families whose router never renormalizes: models/olmoe.py, jamba.py of 0.33.0.
_PLAIN_FAMILIES = {"olmoe", "jamba"}
# Families whose router no kernel computes: softmax with a bias, or a function of their own.
# models/ernie45_moe.py, longcat_flash.py, phimoe.py of 0.33.0; get_routing_method_type in
# layers/fused_moe/config.py (0.26.0, 0.33.0:135).
_UNSPECIFIED_FAMILIES = {"ernie4_5_moe", "longcat_flash", "phimoe"}
_CONFIGURED_FAMILIES = {"qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text", "deepseek_v2"}
_GROUPED_FAMILIES = {
    "deepseek_v3",
    "kimi_k2",
    "deepseek_v32",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "exaone_moe",
    "mimo_v2_flash",
    "nemotron_h",
}
_ORIGINS = {
    "auto_round": "auto-round",
    "intel/auto-round": "auto-round",
    "inc": "auto-round",
    "gptq_marlin": "gptq",
}
_ORIGINS |= dict.fromkeys(
    ("modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8", "mxfp8"), "modelopt"
) | {"awq_marlin": "awq"}


class ExpertTraits(FrozenRecord, frozen=True):
    """Fields of MoeShape that config.json decides; "" for an unknown function or routing."""

    family: str
    origin: str
    function: str
    routing: str
    clamped: bool = False  # the activation has a limit


def expert_traits(spec: ModelSpec, *, is_online: bool = False) -> ExpertTraits:
    """The traits of the model's experts.

    is_online: the engine itself quantizes the weights, as with `--quantization fp8`.
    """
    text = spec.config.get("text_config")
    config: Mapping[str, Any] = text if isinstance(text, Mapping) else spec.config
    family = str(config.get("model_type") or spec.config.get("model_type", ""))
    method = spec.quant.method.lower() if spec.quant else ""
    origin = "online" if is_online else _ORIGINS.get(method, method)
    is_clamped = family in _CLAMPED_FAMILIES and config.get("swiglu_limit") is not None
    return ExpertTraits(
        family,
        origin,
        _scoring_function(config, family),
        _routing_method(config, family),
        is_clamped,
    )


def _scoring_function(config: Mapping[str, Any], family: str) -> str:
    if family in _FUNCTIONS:
        return _FUNCTIONS[family]
    return "silu" if config.get("hidden_act", "silu") in ("silu", "swish") else ""


def _routing_method(config: Mapping[str, Any], family: str) -> str:
    normalized = config.get("norm_topk_prob")
    if family in _GROUPED_FAMILIES:
        return "deepseek" if normalized is not False and config.get("n_group") else ""
    if family in _RENORMALIZED_FAMILIES:
        return "renormalize"
    if family in _PLAIN_FAMILIES:
        return "default"
    if family in _UNSPECIFIED_FAMILIES:
        return "unspecified"
    if family == "minimax_m2":
        return "minimax" if config.get("scoring_func") == "sigmoid" else ""
    if family == "qwen3_next":
        return "default" if normalized is False else "renormalize"
    if family in _CONFIGURED_FAMILIES and config.get("scoring_func", "softmax") == "softmax":
        return "renormalize" if normalized is True else "default"
    return ""
