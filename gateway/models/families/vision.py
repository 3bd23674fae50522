"""Vision towers and projectors: Qwen2.5-VL, Qwen3-VL, Qwen3.5, Mistral 3, Gemma 3. Pure.

Sources: models/qwen2_5_vl.py, qwen3_vl.py, mistral3.py, pixtral.py.
"""

from __future__ import annotations

from typing import Any

from gateway.domain import AttentionGroup, TensorGroup
from gateway.models.families.blueprint import Blueprint, LinearLayer
from gateway.models.families.config import Fields
from gateway.models.families.parts import layer_numbers, mlp, norms, tensor

# Module paths that differ between checkpoint and engine (gemma3_mm.py:516 of 0.33.0).
SIGLIP_PATHS = (
    ("model.language_model.", "language_model.model."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("lm_head.", "language_model.lm_head."),
)
_GEMMA_HIDDEN_SIZE = 2304  # Gemma3TextConfig of transformers

# Module paths that differ between checkpoint and engine (hf_to_vllm_mapper of each model).
QWEN2_PATHS = (
    ("model.language_model.", "language_model.model."),
    ("model.visual.", "visual."),
    ("lm_head.", "language_model.lm_head."),
    ("model.", "language_model.model."),
)
MISTRAL_PATHS = (
    ("model.language_model.", "language_model.model."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("lm_head.", "language_model.lm_head."),
    ("model.", "language_model.model."),
)
QWEN3_PATHS = (
    ("model.visual.", "visual."),
    ("lm_head.", "language_model.lm_head."),
    ("model.language_model.", "language_model.model."),
)
# No real tower has this many blocks.
_MAX_QWEN_BLOCKS = 2000


def _tower_fields(top: Fields) -> Fields:
    return Fields(top.mapping("vision_config", {}), top.source)


def _attention_group(layers: int, heads: int, head_dim: int) -> AttentionGroup:
    return AttentionGroup(
        kind="vision", layers=layers, heads=heads, kv_heads=heads, head_dim=head_dim, causal=False
    )


def _layer_numbers(fields: Fields, default: int) -> range:
    return layer_numbers(
        Fields({"num_hidden_layers": fields.config.get("depth", default)}, fields.source)
    )


def qwen2_tower(top: Fields) -> Blueprint:
    """The tower of Qwen2.5-VL. Missing sizes have the defaults of Qwen2_5_VLVisionConfig."""
    fields = _tower_fields(top)
    blocks = _layer_numbers(fields, 32)
    hidden = fields.integer("hidden_size", default=3584)
    heads = fields.integer("num_heads", default=16)
    width = fields.integer("intermediate_size", default=3420)
    merged_size = hidden * fields.integer("spatial_merge_size", default=2) ** 2
    patch = fields.integer("patch_size", default=14)
    frames = fields.integer("temporal_patch_size", default=2)
    path = "visual.blocks.*"
    channels = fields.integer("in_channels", "in_chans", default=3)
    output_size = fields.integer("out_hidden_size", default=3584)
    linears = [
        LinearLayer(
            f"{path}.attn.qkv",
            blocks,
            hidden,
            (hidden,) * 3,
            "qkv",
            heads=heads,
            kv_heads=heads,
            bias=True,
        ),
        LinearLayer(f"{path}.attn.proj", blocks, hidden, (hidden,), "row", bias=True),
        *mlp(f"{path}.mlp", blocks, hidden, width, bias=True),
        LinearLayer("visual.merger.mlp.*", (0,), merged_size, (merged_size,), "column", bias=True),
        LinearLayer("visual.merger.mlp.*", (2,), merged_size, (output_size,), "row", bias=True),
    ]
    parameters = norms(path, len(blocks), hidden, "norm1", "norm2") + norms(
        "visual.merger", 1, hidden, "ln_q"
    )
    parameters.append(
        tensor("visual.patch_embed.proj.weight", 1, hidden, channels, frames, patch, patch)
    )
    return Blueprint(
        tuple(linears),
        (_attention_group(len(blocks), heads, max(1, hidden // heads)),),
        tuple(parameters),
    )


def qwen_vision(top: Fields) -> Blueprint:
    """The tower of Qwen3.5 (models/qwen3_vl.py)."""
    fields = Fields(top.mapping("vision_config", {}), top.source)
    depth = fields.integer("depth")
    hidden = fields.integer("hidden_size")
    width = fields.integer("intermediate_size")
    if depth > _MAX_QWEN_BLOCKS:
        raise fields.field_error("depth", f"at most {_MAX_QWEN_BLOCKS}")
    blocks = range(depth)
    merged_size = hidden * fields.integer("spatial_merge_size", default=2) ** 2
    path = "visual.blocks.*"
    heads = fields.integer("num_heads")
    output_size = fields.integer("out_hidden_size")
    qkv = (hidden, hidden, hidden)
    linears = (
        LinearLayer(
            f"{path}.attn.qkv", blocks, hidden, qkv, "qkv", heads=heads, kv_heads=heads, bias=True
        ),
        LinearLayer(f"{path}.attn.proj", blocks, hidden, (hidden,), "row", bias=True),
        LinearLayer(f"{path}.mlp.linear_fc1", blocks, hidden, (width,), "column", bias=True),
        LinearLayer(f"{path}.mlp.linear_fc2", blocks, width, (hidden,), "row", bias=True),
        LinearLayer(
            "visual.merger.linear_fc1", (0,), merged_size, (merged_size,), "column", bias=True
        ),
        LinearLayer(
            "visual.merger.linear_fc2", (0,), merged_size, (output_size,), "row", bias=True
        ),
    )
    parameters = [
        tensor(f"{path}.{name}", depth, hidden)
        for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias")
    ]
    parameters += _qwen_patches(fields, hidden)
    group = AttentionGroup(
        kind="vision",
        layers=depth,
        heads=heads,
        kv_heads=heads,
        head_dim=max(1, hidden // heads),
        causal=False,
    )
    return Blueprint(linears, (group,), tuple(parameters))


def _qwen_patches(fields: Fields, hidden: int) -> list[TensorGroup]:
    """Patch embedding, positions, and the norm before the merger.

    Missing sizes have the defaults of Qwen3VLVisionConfig.
    """
    patch = fields.integer("patch_size", default=16)
    frames = fields.integer("temporal_patch_size", default=2)
    return [
        tensor(
            "visual.patch_embed.proj.weight",
            1,
            hidden,
            fields.integer("in_channels", default=3),
            frames,
            patch,
            patch,
        ),
        tensor("visual.patch_embed.proj.bias", 1, hidden),
        tensor(
            "visual.pos_embed.weight",
            1,
            fields.integer("num_position_embeddings", default=2304),
            hidden,
        ),
        tensor("visual.merger.norm.weight", 1, hidden),
        tensor("visual.merger.norm.bias", 1, hidden),
    ]


def qwen3_tower(top: Fields) -> Blueprint:
    """The tower of Qwen3-VL: Qwen3.5's, with mergers that feed the text model's first layers."""
    fields = _tower_fields(top)
    tower = qwen_vision(top)
    levels = fields.config.get("deepstack_visual_indexes", [8, 16, 24])
    if not isinstance(levels, list):
        raise fields.field_error("deepstack_visual_indexes", "a list of block numbers")
    if not levels:
        return tower
    numbers = layer_numbers(Fields({"num_hidden_layers": len(levels)}, fields.source))
    merged_size = (
        fields.integer("hidden_size") * fields.integer("spatial_merge_size", default=2) ** 2
    )
    path = "visual.deepstack_merger_list.*"
    linears = (
        LinearLayer(
            f"{path}.linear_fc1", numbers, merged_size, (merged_size,), "column", bias=True
        ),
        LinearLayer(
            f"{path}.linear_fc2",
            numbers,
            merged_size,
            (fields.integer("out_hidden_size"),),
            "row",
            bias=True,
        ),
    )
    parameters = tuple(
        tensor(f"{path}.norm.{name}", len(numbers), merged_size) for name in ("weight", "bias")
    )
    return Blueprint(tower.linears + linears, tower.attention, tower.parameters + parameters)


def pixtral_tower(top: Fields) -> Blueprint:
    """The tower of Mistral 3. Missing sizes have the defaults of PixtralVisionConfig."""
    fields = _tower_fields(top)
    text = Fields(top.mapping("text_config", {}), top.source)
    blocks = layer_numbers(Fields({"num_hidden_layers": 24} | dict(fields.config), fields.source))
    hidden = fields.integer("hidden_size", default=1024)
    width = fields.integer("intermediate_size", default=4096)
    heads = fields.integer("num_attention_heads", default=16)
    head = fields.integer("head_dim", default=max(1, hidden // heads))
    patch = fields.integer("patch_size", default=16)
    path = "vision_tower.transformer.layers.*"
    text_hidden = text.integer("hidden_size")
    merged_size = hidden * top.integer("spatial_merge_size", default=2) ** 2
    names = ("q_proj", "k_proj", "v_proj")
    bias = top.flag("multimodal_projector_bias")
    linears = [
        LinearLayer(
            f"{path}.attention.qkv_proj",
            blocks,
            hidden,
            (heads * head,) * 3,
            "qkv",
            names,
            heads=heads,
            kv_heads=heads,
        ),
        LinearLayer(f"{path}.attention.o_proj", blocks, heads * head, (hidden,), "row"),
        *mlp(f"{path}.feed_forward", blocks, hidden, width),
        LinearLayer(
            "multi_modal_projector.linear_1", (0,), hidden, (text_hidden,), "column", bias=bias
        ),
        LinearLayer(
            "multi_modal_projector.linear_2", (0,), text_hidden, (text_hidden,), "row", bias=bias
        ),
    ]
    parameters: list[TensorGroup] = [
        *norms(path, len(blocks), hidden, "attention_norm", "ffn_norm"),
        *norms("vision_tower", 1, hidden, "ln_pre"),
        *norms("multi_modal_projector", 1, hidden, "norm"),
        tensor(
            "vision_tower.patch_conv.weight",
            1,
            hidden,
            fields.integer("num_channels", default=3),
            patch,
            patch,
        ),
        tensor("multi_modal_projector.patch_merger.merging_layer.weight", 1, hidden, merged_size),
    ]
    return Blueprint(
        tuple(linears), (_attention_group(len(blocks), heads, head),), tuple(parameters)
    )


def siglip(top: Fields) -> Blueprint:
    """The tower and projector of Gemma 3 (models/siglip.py, gemma3_mm.py).

    Missing sizes have the defaults of SiglipVisionConfig.
    """
    fields = Fields(top.mapping("vision_config", {}), top.source)
    text = Fields(top.mapping("text_config", {}), top.source)
    blocks = layer_numbers(fields)
    hidden = fields.integer("hidden_size", default=768)
    heads = fields.integer("num_attention_heads", default=12)
    width = fields.integer("intermediate_size", default=3072)
    patch = fields.integer("patch_size", default=16)
    channels = fields.integer("num_channels", default=3)
    patches = (fields.integer("image_size", default=224) // patch) ** 2
    path = "vision_tower.vision_model"
    depth = len(blocks)
    layer = f"{path}.encoder.layers.*"
    # bitsandbytes and torchao quantize other sizes too (SiglipMLP, models/siglip.py:449 of 0.18.0).
    is_whole = hidden % 64 == 0 and width % 64 == 0
    qkv = (hidden, hidden, hidden)
    names = ("q_proj", "k_proj", "v_proj")
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": heads, "bias": True}
    linears = (
        LinearLayer(f"{layer}.self_attn.qkv_proj", blocks, hidden, qkv, "qkv", names, **sizes),
        LinearLayer(f"{layer}.self_attn.out_proj", blocks, hidden, (hidden,), "row", bias=True),
        LinearLayer(
            f"{layer}.mlp.fc1",
            blocks,
            hidden,
            (width,),
            "column",
            is_quantizable=is_whole,
            bias=True,
        ),
        LinearLayer(
            f"{layer}.mlp.fc2", blocks, width, (hidden,), "row", is_quantizable=is_whole, bias=True
        ),
    )
    parameters = [
        tensor(f"{layer}.{name}", depth, hidden)
        for name in _norm_names("layer_norm1") + _norm_names("layer_norm2")
    ]
    parameters += [tensor(f"{path}.{name}", 1, hidden) for name in _norm_names("post_layernorm")]
    parameters += [
        tensor(f"{path}.embeddings.patch_embedding.weight", 1, hidden, channels, patch, patch),
        tensor(f"{path}.embeddings.patch_embedding.bias", 1, hidden),
        tensor(f"{path}.embeddings.position_embedding.weight", 1, patches, hidden),
        tensor(
            "multi_modal_projector.mm_input_projection_weight",
            1,
            hidden,
            text.integer("hidden_size", default=_GEMMA_HIDDEN_SIZE),
        ),
        *norms("multi_modal_projector", 1, hidden, "mm_soft_emb_norm"),
    ]
    size = max(1, hidden // heads)
    group = AttentionGroup(
        kind="vision", layers=depth, heads=heads, kv_heads=heads, head_dim=size, causal=False
    )
    return Blueprint(linears, (group,), tuple(parameters))


def _norm_names(name: str) -> list[str]:
    return [f"{name}.weight", f"{name}.bias"]
