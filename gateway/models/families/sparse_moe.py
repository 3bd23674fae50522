"""Decoders with experts in all or most layers: Mixtral, gpt-oss, Qwen2/3-MoE, GLM-4-MoE. Pure.

Sources: models/mixtral.py, gpt_oss.py, qwen2_moe.py, qwen3_moe.py, glm4_moe.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.models.families.blueprint import Blueprint
from gateway.models.families.config import Fields
from gateway.models.families.parts import (
    LAYER_NORMS,
    attention,
    embedding_and_head,
    experts,
    late_moe,
    layer_numbers,
    norms,
    qwen_mlps,
    read_heads,
    router,
    softmax_groups,
    tensor,
)


def mixtral(fields: Fields, family: str, path: str) -> Blueprint:
    numbers = layer_numbers(fields)
    hidden = fields.integer("hidden_size")
    layer = f"{path}.layers.*"
    count = fields.integer("num_local_experts")
    block = f"{layer}.block_sparse_moe"
    linears = [
        *attention(fields, family, f"{layer}.self_attn", numbers),
        router(f"{block}.gate", numbers, hidden, count),
        *experts(block, numbers, hidden, fields.integer("intermediate_size"), count),
    ]
    parameters = embedding_and_head(fields, path) + norms(layer, len(numbers), hidden, *LAYER_NORMS)
    return Blueprint(tuple(linears), softmax_groups(fields, family), tuple(parameters))


def gpt_oss(fields: Fields, family: str, path: str) -> Blueprint:
    numbers = layer_numbers(fields)
    hidden = fields.integer("hidden_size")
    layer = f"{path}.layers.*"
    count = fields.integer("num_local_experts")
    linears = [
        *attention(fields, family, f"{layer}.attn", numbers, biases=(True, True)),
        router(f"{layer}.mlp.router", numbers, hidden, count, bias=True),
        *experts(
            f"{layer}.mlp", numbers, hidden, fields.integer("intermediate_size"), count, bias=True
        ),
    ]
    parameters = embedding_and_head(fields, path, embedding="embedding") + norms(
        layer, len(numbers), hidden, *LAYER_NORMS
    )
    parameters.append(
        tensor(f"{layer}.attn.sinks", len(numbers), read_heads(fields, family)[0], shard="column")
    )
    return Blueprint(
        tuple(linears), softmax_groups(fields, family, has_sinks=True), tuple(parameters)
    )


def qwen_moe(fields: Fields, family: str, path: str) -> Blueprint:
    numbers = layer_numbers(fields)
    layer = f"{path}.layers.*"
    bias = family == "qwen2_moe" or fields.flag("attention_bias")
    linears = attention(
        fields, family, f"{layer}.self_attn", numbers, biases=(bias, False)
    ) + qwen_mlps(fields, family, layer, numbers)
    parameters = embedding_and_head(fields, path) + norms(
        layer, len(numbers), fields.integer("hidden_size"), *LAYER_NORMS
    )
    if family == "qwen3_moe":
        parameters += norms(
            f"{layer}.self_attn", len(numbers), read_heads(fields, family)[2], "q_norm", "k_norm"
        )
    return Blueprint(tuple(linears), softmax_groups(fields, family), tuple(parameters))


def glm_moe(fields: Fields, family: str, path: str) -> Blueprint:
    numbers = layer_numbers(fields)
    hidden = fields.integer("hidden_size")
    layer = f"{path}.layers.*"
    mlps, parameters = late_moe(fields, layer, numbers, has_float_router=True)
    linears = (
        attention(
            fields,
            family,
            f"{layer}.self_attn",
            numbers,
            biases=(fields.flag("attention_bias"), False),
        )
        + mlps
    )
    parameters += embedding_and_head(fields, path) + norms(
        layer, len(numbers), hidden, *LAYER_NORMS
    )
    if fields.flag("use_qk_norm"):
        parameters += norms(
            f"{layer}.self_attn", len(numbers), read_heads(fields, family)[2], "q_norm", "k_norm"
        )
    return Blueprint(tuple(linears), softmax_groups(fields, family), tuple(parameters))


def qwen3_vl_moe(fields: Fields, _: str, path: str) -> Blueprint:
    """The text model of Qwen3-VL-MoE."""
    return qwen_moe(fields, "qwen3_moe", path)


FAMILIES: Mapping[str, Callable[[Fields, str, str], Blueprint]] = {
    "mixtral": mixtral,
    "gpt_oss": gpt_oss,
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), qwen_moe),
    "glm4_moe": glm_moe,
    "qwen3_vl_moe_text": qwen3_vl_moe,
}
