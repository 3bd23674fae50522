"""Decoders of equal layers with attention and a gated MLP. Pure.

Sources: models/llama.py, qwen2.py, qwen3.py, gemma*.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.models.families.blueprint import Blueprint
from gateway.models.families.config import Fields
from gateway.models.families.parts import (
    attention,
    embedding_and_head,
    layer_numbers,
    mlp,
    norms,
    read_heads,
    softmax_groups,
)

_GEMMA = {"gemma", "gemma2", "gemma3_text"}
# Families with norms after attention and MLP too, before the residual is added.
_FOUR_NORMS = {"gemma2", "gemma3_text"}
_QK_NORM = {"qwen3", "gemma3_text"}


def dense(fields: Fields, family: str, path: str) -> Blueprint:
    """The layers of models with attention and a plain MLP in each layer."""
    numbers = layer_numbers(fields)
    hidden = fields.integer("hidden_size")
    layer = f"{path}.layers.*"
    is_fused = family == "phi3"
    qkv_bias, out_bias, mlp_bias = _biases(fields, family)
    linears = attention(
        fields,
        family,
        f"{layer}.self_attn",
        numbers,
        is_fused=is_fused,
        biases=(qkv_bias, out_bias),
    ) + mlp(
        f"{layer}.mlp",
        numbers,
        hidden,
        fields.integer("intermediate_size"),
        is_fused=is_fused,
        bias=mlp_bias,
    )
    surrounding_names = ["input_layernorm", "post_attention_layernorm"]
    if family in _FOUR_NORMS:
        surrounding_names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    parameters = embedding_and_head(fields, path, is_tied=family in _GEMMA) + norms(
        layer, len(numbers), hidden, *surrounding_names
    )
    if family == "gemma2":
        # The head is always the embedding (models/gemma2.py).
        parameters = [
            parameter for parameter in parameters if not parameter.name.endswith("lm_head.weight")
        ]
    if family in _QK_NORM:
        parameters += norms(
            f"{layer}.self_attn", len(numbers), read_heads(fields, family)[2], "q_norm", "k_norm"
        )
    return Blueprint(tuple(linears), softmax_groups(fields, family), tuple(parameters))


def _biases(fields: Fields, family: str) -> tuple[bool, bool, bool]:
    """Whether (qkv, output, MLP) projections have a bias. Source: LlamaDecoderLayer,
    GraniteDecoderLayer, Qwen2Attention,
    Qwen3DecoderLayer, Gemma2Attention, Gemma3Attention; Mistral and Phi-3 are Llama's classes."""
    has_bias = fields.flag("attention_bias")
    if family == "qwen2":
        return True, False, False
    if family == "qwen3":
        return has_bias, False, False
    if family == "gemma":
        return False, False, False
    if family in _GEMMA:
        return has_bias, has_bias, False
    has_bias = has_bias or fields.flag("bias")
    qkv = (
        fields.flag("qkv_bias") if "qkv_bias" in fields.config and family != "granite" else has_bias
    )
    return qkv, has_bias, fields.flag("mlp_bias")


def qwen3_vl(fields: Fields, _: str, path: str) -> Blueprint:
    """The text model of Qwen3-VL."""
    return dense(fields, "qwen3", path)


FAMILIES: Mapping[str, Callable[[Fields, str, str], Blueprint]] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "granite", "gemma", "gemma2", "gemma3_text", "phi3"),
        dense,
    ),
    "qwen3_vl_text": qwen3_vl,
}
