"""The vision tower and projector of Gemma 3 (models/siglip.py, gemma3_mm.py). Pure."""

from __future__ import annotations

from gateway.core.model.families.blueprint import Blueprint, Built
from gateway.core.model.families.config import Fields
from gateway.core.model.families.parts import layer_numbers, norms, tensor
from gateway.domain import AttentionGroup

# Module paths of the checkpoint that the engine's model class names otherwise (gemma3_mm.py:516 of 0.33.0).
PATHS = (
    ("model.language_model.", "language_model.model."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("lm_head.", "language_model.lm_head."),
)
_TEXT_HIDDEN = 2304  # Gemma3TextConfig of transformers


def siglip(top: Fields) -> Blueprint:
    """Sizes that are not there are SiglipVisionConfig's."""
    fields = Fields(top.mapping("vision_config", {}), top.source)
    text = Fields(top.mapping("text_config", {}), top.source)
    blocks, hidden = layer_numbers(fields), fields.integer("hidden_size", default=768)
    heads, width = fields.integer("num_attention_heads", default=12), fields.integer("intermediate_size", default=3072)
    patch, channels = fields.integer("patch_size", default=16), fields.integer("num_channels", default=3)
    patches = (fields.integer("image_size", default=224) // patch) ** 2
    path, depth = "vision_tower.vision_model", len(blocks)
    layer = f"{path}.encoder.layers.*"
    whole = (
        hidden % 64 == 0 and width % 64 == 0
    )  # bitsandbytes and torchao quantize others too (SiglipMLP, models/siglip.py:449 of 0.18.0)
    qkv, names = (hidden, hidden, hidden), ("q_proj", "k_proj", "v_proj")
    linears = (
        Built(f"{layer}.self_attn.qkv_proj", blocks, hidden, qkv, "qkv", names, heads=heads, kv_heads=heads, bias=True),
        Built(f"{layer}.self_attn.out_proj", blocks, hidden, (hidden,), "row", bias=True),
        Built(f"{layer}.mlp.fc1", blocks, hidden, (width,), "column", quantizable=whole, bias=True),
        Built(f"{layer}.mlp.fc2", blocks, width, (hidden,), "row", quantizable=whole, bias=True),
    )
    others = [tensor(f"{layer}.{name}", depth, hidden) for name in _norm("layer_norm1") + _norm("layer_norm2")]
    others += [tensor(f"{path}.{name}", 1, hidden) for name in _norm("post_layernorm")]
    others += [
        tensor(f"{path}.embeddings.patch_embedding.weight", 1, hidden, channels, patch, patch),
        tensor(f"{path}.embeddings.patch_embedding.bias", 1, hidden),
        tensor(f"{path}.embeddings.position_embedding.weight", 1, patches, hidden),
        tensor(
            "multi_modal_projector.mm_input_projection_weight", 1, hidden, text.integer("hidden_size", default=_TEXT_HIDDEN)
        ),
        *norms("multi_modal_projector", 1, hidden, "mm_soft_emb_norm"),
    ]
    size = max(1, hidden // heads)
    group = AttentionGroup(kind="vision", layers=depth, heads=heads, kv_heads=heads, head_dim=size, causal=False)
    return Blueprint(linears, (group,), tuple(others))


def _norm(name: str) -> list[str]:
    return [f"{name}.weight", f"{name}.bias"]
