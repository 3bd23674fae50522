"""The vision tower of Qwen3.5 (models/qwen3_vl.py). Pure."""

from __future__ import annotations

from gateway.core.model.blueprint import Blueprint, Built
from gateway.core.model.config import Fields
from gateway.core.model.families.parts import tensor
from gateway.domain import AttentionGroup, TensorGroup

# Module paths of the checkpoint that the engine's model class names otherwise.
PATHS = (
    ("model.visual.", "visual."),
    ("lm_head.", "language_model.lm_head."),
    ("model.language_model.", "language_model.model."),
)
# More blocks than any tower has.
_MOST_BLOCKS = 2000


def qwen_vision(top: Fields) -> Blueprint:
    fields = Fields(top.mapping("vision_config", {}), top.source)
    depth, hidden, width = fields.integer("depth"), fields.integer("hidden_size"), fields.integer("intermediate_size")
    if depth > _MOST_BLOCKS:
        raise fields.wrong("depth", f"at most {_MOST_BLOCKS}")
    blocks = range(depth)
    merged = hidden * fields.integer("spatial_merge_size", default=2) ** 2
    path, heads = "visual.blocks.*", fields.integer("num_heads")
    out = fields.integer("out_hidden_size")
    qkv = (hidden, hidden, hidden)
    linears = (
        Built(f"{path}.attn.qkv", blocks, hidden, qkv, "qkv", heads=heads, kv_heads=heads, bias=True),
        Built(f"{path}.attn.proj", blocks, hidden, (hidden,), "row", bias=True),
        Built(f"{path}.mlp.linear_fc1", blocks, hidden, (width,), "column", bias=True),
        Built(f"{path}.mlp.linear_fc2", blocks, width, (hidden,), "row", bias=True),
        Built("visual.merger.linear_fc1", (0,), merged, (merged,), "column", bias=True),
        Built("visual.merger.linear_fc2", (0,), merged, (out,), "row", bias=True),
    )
    others = [tensor(f"{path}.{name}", depth, hidden) for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias")]
    others += _patches(fields, hidden)
    group = AttentionGroup(
        kind="vision", layers=depth, heads=heads, kv_heads=heads, head_dim=max(1, hidden // heads), causal=False
    )
    return Blueprint(linears, (group,), tuple(others))


def _patches(fields: Fields, hidden: int) -> list[TensorGroup]:
    """Patches in, positions, and the norm before they are merged. Sizes that are not there are Qwen3VLVisionConfig's."""
    patch, frames = fields.integer("patch_size", default=16), fields.integer("temporal_patch_size", default=2)
    return [
        tensor("visual.patch_embed.proj.weight", 1, hidden, fields.integer("in_channels", default=3), frames, patch, patch),
        tensor("visual.patch_embed.proj.bias", 1, hidden),
        tensor("visual.pos_embed.weight", 1, fields.integer("num_position_embeddings", default=2304), hidden),
        tensor("visual.merger.norm.weight", 1, hidden),
        tensor("visual.merger.norm.bias", 1, hidden),
    ]
