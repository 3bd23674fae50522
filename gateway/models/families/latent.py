"""Multi-head latent attention (models/deepseek_v2.py), with DeepSeek V3.2's indexer. Pure.

Latents are replicated and heads are sharded. The indexer chooses the tokens of attention (Indexer).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from gateway.domain import AttentionGroup, TensorGroup
from gateway.models.families.blueprint import Blueprint, LinearLayer
from gateway.models.families.config import Fields
from gateway.models.families.parts import (
    LAYER_NORMS,
    embedding_and_head,
    late_moe,
    layer_numbers,
    norms,
    tensor,
)

# vLLM 0.18.0 and 0.19.1: two projections of the hidden state, of which one is quantized; one from
# 0.26.0 on (Indexer in models/deepseek_v2.py).
SPLIT_INDEXER = "split_indexer"


def deepseek(fields: Fields, _: str, path: str) -> Blueprint:
    numbers = layer_numbers(fields)
    layer = f"{path}.layers.*"
    mlps, parameters = late_moe(fields, layer, numbers)
    projections, inner_groups = latent_attention(fields, f"{layer}.self_attn", numbers)
    parameters += inner_groups + embedding_and_head(fields, path)
    parameters += norms(layer, len(numbers), fields.integer("hidden_size"), *LAYER_NORMS)
    return Blueprint(
        tuple(projections + mlps), (latent_group(fields, len(numbers)),), tuple(parameters)
    )


def latent_group(fields: Fields, layers: int) -> AttentionGroup:
    """The attention group: one latent and one rotary key in the cache for all heads."""
    latent = fields.integer("kv_lora_rank")
    rope = fields.integer("qk_rope_head_dim")
    heads = fields.integer("num_attention_heads")
    return AttentionGroup(
        kind="mla", layers=layers, heads=heads, kv_heads=1, head_dim=latent + rope, value_dim=latent
    )


def latent_attention(
    fields: Fields, path: str, numbers: Sequence[int]
) -> tuple[list[LinearLayer], list[TensorGroup]]:
    """Source: MultiHeadLatentAttention modules of DeepseekV2MLAAttention."""
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    latent = fields.integer("kv_lora_rank")
    rope = fields.integer("qk_rope_head_dim")
    nope_dim = fields.integer("qk_nope_head_dim")
    value = fields.integer("v_head_dim")
    query = heads * (nope_dim + rope)
    parameters = norms(path, len(numbers), latent, "kv_a_layernorm")
    # null: no low rank. transformers reads a missing field as 1536.
    if "q_lora_rank" not in fields.config:
        raise fields.missing_field_error("q_lora_rank")
    if fields.config["q_lora_rank"] is None:
        linears = [
            LinearLayer(f"{path}.q_proj", numbers, hidden, (query,), "column", heads=heads),
            LinearLayer(
                f"{path}.kv_a_proj_with_mqa", numbers, hidden, (latent + rope,), "replicated"
            ),
        ]
    else:
        rank = fields.integer("q_lora_rank")
        fused = ("q_a_proj", "kv_a_proj_with_mqa")
        linears = [
            LinearLayer(
                name=f"{path}.fused_qkv_a_proj",
                numbers=numbers,
                k=hidden,
                parts=(rank, latent + rope),
                shard="replicated",
                modules=fused,
            ),
            LinearLayer(f"{path}.q_b_proj", numbers, rank, (query,), "column", heads=heads),
        ]
        parameters += norms(path, len(numbers), rank, "q_a_layernorm")
    linears += [
        LinearLayer(
            f"{path}.kv_b_proj",
            numbers,
            latent,
            (heads * (nope_dim + value),),
            "column",
            heads=heads,
        ),
        LinearLayer(f"{path}.o_proj", numbers, heads * value, (hidden,), "row"),
    ]
    return linears, parameters


def deepseek_sparse(fields: Fields, family: str, path: str, traits: Collection[str]) -> Blueprint:
    """DeepSeek V3.2: latent attention with a replicated indexer."""
    inner_blueprint = deepseek(fields, family, path)
    numbers = layer_numbers(fields)
    hidden = fields.integer("hidden_size")
    rank = fields.integer("q_lora_rank")
    heads = fields.integer("index_n_heads")
    size = fields.integer("index_head_dim")
    indexer = f"{path}.layers.*.self_attn.indexer"
    linears = [LinearLayer(f"{indexer}.wq_b", numbers, rank, (heads * size,), "replicated")]
    if SPLIT_INDEXER in traits:
        linears.append(LinearLayer(f"{indexer}.wk", numbers, hidden, (size,), "replicated"))
        linears.append(
            LinearLayer(
                f"{indexer}.weights_proj",
                numbers,
                hidden,
                (heads,),
                "replicated",
                is_quantizable=False,
            )
        )
    else:
        widths = (size, heads)
        linears.append(
            LinearLayer(
                f"{indexer}.wk_weights_proj",
                numbers,
                hidden,
                widths,
                "replicated",
                is_quantizable=False,
            )
        )
    parameters = tuple(
        tensor(f"{indexer}.k_norm.{name}", len(numbers), size, dtype="F32")
        for name in ("weight", "bias")
    )
    attention = tuple(group.evolve(index_dim=size) for group in inner_blueprint.attention)
    return Blueprint(
        (*inner_blueprint.linears, *linears), attention, inner_blueprint.parameters + parameters
    )


FAMILIES: Mapping[str, Callable[[Fields, str, str], Blueprint]] = dict.fromkeys(
    ("deepseek_v2", "deepseek_v3"), deepseek
)
VARIED_FAMILIES: Mapping[str, Callable[[Fields, str, str, Collection[str]], Blueprint]] = {
    "deepseek_v32": deepseek_sparse
}
