"""Decoders of experts with their own norms or routers: Phi-MoE, MiniMax-M2, ERNIE 4.5. Pure.

Sources: models/phimoe.py, minimax_m2.py, ernie45_moe.py. Missing fields have the defaults of
transformers' configuration classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gateway.models.families.blueprint import Blueprint
from gateway.models.families.config import Fields
from gateway.models.families.parts import (
    LAYER_NORMS,
    attention,
    embedding_and_head,
    experts,
    layer_numbers,
    mlp,
    norms,
    read_heads,
    router,
    softmax_groups,
    tensor,
)


def phi_moe(fields: Fields, family: str, path: str) -> Blueprint:
    """Phi-MoE: norms and head have a bias."""
    numbers = layer_numbers(fields)
    hidden = fields.integer("hidden_size")
    layer = f"{path}.layers.*"
    count = fields.integer("num_local_experts")
    block = f"{layer}.block_sparse_moe"
    bias = fields.flag("attention_bias")
    linears = [
        *attention(fields, family, f"{layer}.self_attn", numbers, biases=(bias, bias)),
        router(f"{block}.gate", numbers, hidden, count),
        *experts(block, numbers, hidden, fields.integer("intermediate_size"), count),
    ]
    parameters = embedding_and_head(fields, path) + norms(layer, len(numbers), hidden, *LAYER_NORMS)
    parameters += [tensor(f"{layer}.{name}.bias", len(numbers), hidden) for name in LAYER_NORMS]
    parameters.append(tensor(f"{path}.norm.bias", 1, hidden))
    if fields.flag("lm_head_bias"):
        parameters.append(tensor("lm_head.bias", 1, fields.integer("vocab_size"), shard="vocab"))
    return Blueprint(tuple(linears), softmax_groups(fields, family), tuple(parameters))


def minimax(fields: Fields, family: str, path: str) -> Blueprint:
    """MiniMax-M2: norms over all heads, sharded like the heads, and a router in float32."""
    numbers = layer_numbers(fields)
    hidden = fields.integer("hidden_size")
    layer = f"{path}.layers.*"
    count = fields.integer("num_local_experts")
    block = f"{layer}.block_sparse_moe"
    layers = len(numbers)
    heads, kv_heads, head_dim = read_heads(fields, family)
    linears = [
        *attention(
            fields,
            family,
            f"{layer}.self_attn",
            numbers,
            biases=(fields.flag("attention_bias"), False),
        ),
        *experts(block, numbers, hidden, fields.integer("intermediate_size"), count),
    ]
    parameters = embedding_and_head(fields, path) + norms(layer, layers, hidden, *LAYER_NORMS)
    parameters += [
        tensor(f"{layer}.self_attn.q_norm.weight", layers, heads * head_dim, shard="column"),
        tensor(f"{layer}.self_attn.k_norm.weight", layers, kv_heads * head_dim, shard="column"),
        tensor(f"{block}.gate.weight", layers, count, hidden, dtype="F32"),
    ]
    if fields.flag("use_routing_bias"):
        parameters.append(tensor(f"{block}.e_score_correction_bias", layers, count, dtype="F32"))
    return Blueprint(tuple(linears), softmax_groups(fields, family), tuple(parameters))


def ernie(fields: Fields, family: str, path: str) -> Blueprint:
    """ERNIE 4.5: a range of layers has experts, with a router in float32."""
    numbers = layer_numbers(fields)
    hidden = fields.integer("hidden_size")
    layer = f"{path}.layers.*"
    sparse_numbers = _ernie_sparse_layers(fields, numbers)
    dense_numbers = sorted(set(numbers) - set(sparse_numbers))
    block = f"{layer}.mlp"
    bias = fields.flag("use_bias")
    linears = [
        *attention(fields, family, f"{layer}.self_attn", numbers, biases=(bias, bias)),
        *mlp(block, dense_numbers, hidden, fields.integer("intermediate_size"), bias=bias),
    ]
    parameters = embedding_and_head(fields, path, is_tied=True) + norms(
        layer, len(numbers), hidden, *LAYER_NORMS
    )
    if sparse_numbers:
        count = fields.integer("moe_num_experts")
        width = fields.integer("moe_intermediate_size")
        linears += experts(block, sparse_numbers, hidden, width, count)
        if shared_count := fields.integer("moe_num_shared_experts", default=0, minimum=0):
            linears += mlp(f"{block}.shared_experts", sparse_numbers, hidden, width * shared_count)
        parameters.append(
            tensor(f"{block}.gate.weight", len(sparse_numbers), count, hidden, dtype="F32")
        )
        parameters.append(
            tensor(f"{block}.gate.e_score_correction_bias", len(sparse_numbers), count, dtype="F32")
        )
    return Blueprint(tuple(linears), softmax_groups(fields, family), tuple(parameters))


def _ernie_sparse_layers(fields: Fields, numbers: Sequence[int]) -> list[int]:
    """Source: Ernie4_5_MoeDecoderLayer (models/ernie45_moe.py:337 of 0.33.0); -1 is the last
    layer."""
    first = fields.integer("moe_layer_start_index", default=1, minimum=0)
    step = fields.integer("moe_layer_interval", default=1)
    last = fields.integer("moe_layer_end_index", default=-1, minimum=-1)
    last = len(numbers) - 1 if last == -1 else last
    return [number for number in numbers if first <= number <= last and (number + 1) % step == 0]


FAMILIES: Mapping[str, Callable[[Fields, str, str], Blueprint]] = {
    "phimoe": phi_moe,
    "minimax_m2": minimax,
    "ernie4_5_moe": ernie,
}
