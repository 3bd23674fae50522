"""The towers of Gemma 4 (models/gemma4_mm.py): transformers' modules, replicated. Pure.

Attention is torch's and not an engine backend's, so the towers have no attention group. Missing
sizes have the defaults of Gemma4VisionConfig and Gemma4AudioConfig.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.domain import TensorGroup
from gateway.models.families.blueprint import Blueprint, LinearLayer
from gateway.models.families.config import Fields
from gateway.models.families.parts import layer_numbers, norms, tensor

# Module paths that differ between checkpoint and engine (gemma4_mm.py:1067 of 0.33.0).
PATHS = (
    ("model.vision_tower.", "vision_tower."),
    ("model.embed_vision.", "embed_vision."),
    ("model.audio_tower.", "audio_tower."),
    ("model.embed_audio.", "embed_audio."),
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.", "language_model.model."),
)
# vLLM 0.19.1 uses transformers' own modules for these towers, and quantizes none of them
# (models/gemma4_mm.py).
PLAIN_TOWERS_TRAIT = "plain_gemma4_towers"
_TEXT_HIDDEN_SIZE = 2304  # Gemma4TextConfig of transformers


# Methods that accept every size. The other methods skip a tower whose sizes are not multiples of 64
# (_get_tower_quant_config in models/gemma4_mm.py of 0.33.0).
_ANY_SIZE = ("bitsandbytes", "torchao", "compressed-tensors")


def gemma_towers(top: Fields) -> Blueprint:
    linears: list[LinearLayer] = []
    parameters: list[TensorGroup] = []
    for name, build in (("vision_config", _vision_tower), ("audio_config", _audio)):
        if top.config.get(name) is not None:
            fields = Fields(top.mapping(name, {}), top.source)
            text = Fields(top.mapping("text_config", {}), top.source)
            tower, inner_groups = build(
                fields, text.integer("hidden_size", default=_TEXT_HIDDEN_SIZE)
            )
            method = top.mapping("quantization_config", {}).get("quant_method")
            is_odd = any(
                fields.integer(size, default=64) % 64
                for size in ("hidden_size", "intermediate_size")
            )
            if is_odd and method not in _ANY_SIZE:
                tower = [layer.evolve(is_quantizable=False) for layer in tower]
            linears = linears + tower
            parameters = parameters + inner_groups
    return Blueprint(tuple(linears), (), tuple(parameters))


def _replicated_layer(
    name: str, numbers: Sequence[int], k: int, n: int, *, bias: bool = False
) -> LinearLayer:
    return LinearLayer(name, numbers, k, (n,), "replicated", bias=bias)


def _vision_tower(fields: Fields, text_hidden: int) -> tuple[list[LinearLayer], list[TensorGroup]]:
    """Layers and parameters of the tower for images, whole on every rank."""
    blocks = layer_numbers(_layers(fields, 16))
    hidden = fields.integer("hidden_size", default=768)
    width = fields.integer("intermediate_size", default=3072)
    head = fields.integer("head_dim", default=64)
    patch = fields.integer("patch_size", default=16)
    query = fields.integer("num_attention_heads", default=12) * head
    key = fields.integer("num_key_value_heads", default=12) * head
    path = "vision_tower.encoder.layers.*"
    depth = len(blocks)
    projections = {
        "q_proj": (hidden, query),
        "k_proj": (hidden, key),
        "v_proj": (hidden, key),
        "o_proj": (query, hidden),
    }
    products = {
        "gate_proj": (hidden, width),
        "up_proj": (hidden, width),
        "down_proj": (width, hidden),
    }
    linears = [
        _replicated_layer(f"{path}.self_attn.{name}.linear", blocks, *size)
        for name, size in projections.items()
    ]
    linears += [
        _replicated_layer(f"{path}.mlp.{name}.linear", blocks, *size)
        for name, size in products.items()
    ]
    linears.append(
        _replicated_layer("vision_tower.patch_embedder.input_proj", (0,), 3 * patch**2, hidden)
    )
    linears.append(
        _replicated_layer("embed_vision.embedding_projection", (0,), hidden, text_hidden)
    )
    positions = fields.integer("position_embedding_size", default=10240)
    parameters = [
        tensor("vision_tower.patch_embedder.position_embedding_table", 1, 2, positions, hidden)
    ]
    parameters += norms(f"{path}.self_attn", depth, head, "q_norm", "k_norm")
    surrounding_names = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    return linears, parameters + norms(path, depth, hidden, *surrounding_names)


def _audio(fields: Fields, text_hidden: int) -> tuple[list[LinearLayer], list[TensorGroup]]:
    """A conformer after two convolutions that halve 128 mel bins each."""
    blocks = layer_numbers(_layers(fields, 12))
    hidden = fields.integer("hidden_size", default=1024)
    output = fields.integer("output_proj_dims", default=1536)
    kernel = fields.integer("conv_kernel_size", default=5)
    channels = fields.config.get("subsampling_conv_channels", [128, 32])
    if (
        not isinstance(channels, list)
        or len(channels) != 2
        or not all(type(size) is int and size >= 4 for size in channels)
    ):
        raise fields.field_error(
            "subsampling_conv_channels", "a list of two whole numbers from 4 on"
        )
    near_channels, far_channels = channels
    path = "audio_tower.layers.*"
    depth = len(blocks)
    linears = [
        _replicated_layer(f"{path}.self_attn.{name}.linear", blocks, hidden, hidden)
        for name in _SQUARE_LAYERS
    ]
    linears.append(_replicated_layer(f"{path}.self_attn.relative_k_proj", blocks, hidden, hidden))
    for name in ("feed_forward1", "feed_forward2"):
        linears.append(
            _replicated_layer(f"{path}.{name}.ffw_layer_1.linear", blocks, hidden, 4 * hidden)
        )
        linears.append(
            _replicated_layer(f"{path}.{name}.ffw_layer_2.linear", blocks, 4 * hidden, hidden)
        )
    linears += [
        _replicated_layer(f"{path}.lconv1d.linear_start.linear", blocks, hidden, 2 * hidden),
        _replicated_layer(f"{path}.lconv1d.linear_end.linear", blocks, hidden, hidden),
        _replicated_layer(
            "audio_tower.subsample_conv_projection.input_proj_linear",
            (0,),
            near_channels // 4 * far_channels,
            hidden,
        ),
        _replicated_layer("audio_tower.output_proj", (0,), hidden, output, bias=True),
        _replicated_layer("embed_audio.embedding_projection", (0,), output, text_hidden),
    ]
    first = "audio_tower.subsample_conv_projection"
    parameters = [
        tensor(
            f"{path}.self_attn.per_dim_scale",
            depth,
            hidden // fields.integer("num_attention_heads", default=8),
        ),
        tensor(f"{path}.lconv1d.depthwise_conv1d.weight", depth, hidden, 1, kernel),
        tensor(f"{first}.layer0.conv.weight", 1, near_channels, 1, 3, 3),
        tensor(f"{first}.layer1.conv.weight", 1, far_channels, near_channels, 3, 3),
        *norms(first, 1, near_channels, "layer0.norm"),
        *norms(first, 1, far_channels, "layer1.norm"),
        *norms(f"{path}.lconv1d", depth, hidden, "conv_norm", "pre_layer_norm"),
        *norms(path, depth, hidden, "norm_out", "norm_post_attn", "norm_pre_attn"),
    ]
    for name in ("feed_forward1", "feed_forward2"):
        parameters += norms(f"{path}.{name}", depth, hidden, "pre_layer_norm", "post_layer_norm")
    return linears, parameters


_SQUARE_LAYERS = ("q_proj", "k_proj", "v_proj", "post")


def _layers(fields: Fields, count: int) -> Fields:
    return (
        fields
        if "num_hidden_layers" in fields.config
        else Fields({"num_hidden_layers": count}, fields.source)
    )
