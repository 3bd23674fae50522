"""Multi-head latent attention (models/deepseek_v2.py): latents are whole on every rank, heads are cut. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gateway.core.model.blueprint import Blueprint, Built
from gateway.core.model.config import Fields
from gateway.core.model.families.moe import late_moe
from gateway.core.model.families.parts import ends, layer_numbers, norms
from gateway.domain import AttentionGroup, TensorGroup


def deepseek(fields: Fields, _: str, path: str) -> Blueprint:
    numbers, layer = layer_numbers(fields), f"{path}.layers.*"
    mlps, others = late_moe(fields, layer, numbers)
    projections, inner = latent_attention(fields, f"{layer}.self_attn", numbers)
    others += inner + ends(fields, path)
    others += norms(layer, len(numbers), fields.integer("hidden_size"), "input_layernorm", "post_attention_layernorm")
    return Blueprint(tuple(projections + mlps), (latent_group(fields, len(numbers)),), tuple(others))


def latent_group(fields: Fields, layers: int) -> AttentionGroup:
    """The cache keeps a latent and the rotary part of the key, once for all heads."""
    latent, rope = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim")
    heads = fields.integer("num_attention_heads")
    return AttentionGroup(kind="mla", layers=layers, heads=heads, kv_heads=1, head_dim=latent + rope, value_dim=latent)


def latent_attention(fields: Fields, path: str, numbers: Sequence[int]) -> tuple[list[Built], list[TensorGroup]]:
    """Source: MultiHeadLatentAttention modules of DeepseekV2MLAAttention."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    latent, rope = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim")
    nope, value = fields.integer("qk_nope_head_dim"), fields.integer("v_head_dim")
    query = heads * (nope + rope)
    others = norms(path, len(numbers), latent, "kv_a_layernorm")
    # null is without; transformers reads a config without it as 1536.
    if "q_lora_rank" not in fields.config:
        raise fields.missing("q_lora_rank")
    if fields.config["q_lora_rank"] is None:
        built = [
            Built(f"{path}.q_proj", numbers, hidden, (query,), "column", heads=heads),
            Built(f"{path}.kv_a_proj_with_mqa", numbers, hidden, (latent + rope,), "replicated"),
        ]
    else:
        rank = fields.integer("q_lora_rank")
        fused = ("q_a_proj", "kv_a_proj_with_mqa")
        built = [
            Built(f"{path}.fused_qkv_a_proj", numbers, hidden, (rank, latent + rope), "replicated", fused),
            Built(f"{path}.q_b_proj", numbers, rank, (query,), "column", heads=heads),
        ]
        others += norms(path, len(numbers), rank, "q_a_layernorm")
    built += [
        Built(f"{path}.kv_b_proj", numbers, latent, (heads * (nope + value),), "column", heads=heads),
        Built(f"{path}.o_proj", numbers, heads * value, (hidden,), "row"),
    ]
    return built, others


FAMILIES: Mapping[str, Callable[[Fields, str, str], Blueprint]] = dict.fromkeys(("deepseek_v2", "deepseek_v3"), deepseek)
