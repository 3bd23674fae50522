"""The text model of Gemma 4 (models/gemma4.py), and config defaults of Gemma 3 and 4. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from gateway.domain import AttentionGroup, TensorGroup
from gateway.domain.record import FrozenRecord
from gateway.models.families.blueprint import Blueprint, LinearLayer
from gateway.models.families.config import Fields
from gateway.models.families.parts import (
    embedding_and_head,
    experts,
    layer_numbers,
    mlp,
    norms,
    router,
    tensor,
)

# Fields that a published config.json leaves out. Source: Gemma3TextConfig and Gemma4TextConfig of
# transformers.
_GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "max_position_embeddings": 131072,
}
_GEMMA4 = _GEMMA3 | {"vocab_size": 262144, "num_hidden_layers": 30, "sliding_window": 512}
DEFAULTS: Mapping[str, Mapping[str, int]] = {"gemma3_text": _GEMMA3, "gemma4_text": _GEMMA4}
_FULL_LAYER_INTERVAL = 6

# vLLM 0.19.1 and 0.26.0: layers that read the keys and values of earlier layers still project their
# own, and drop them. Experts have their own module (Gemma4Attention and Gemma4DecoderLayer in
# models/gemma4.py).
EARLY_GEMMA4 = "early_gemma4"
# SGLang's pool has a place for the keys and values of every layer, also of those that store none
# (HybridSWAPoolConfigurator in srt/model_executor/pool_configurator.py of 0.5.23).
SHARED_LAYERS_HAVE_PLACES = "shared_layers_have_places"


def gemma4(fields: Fields, _: str, path: str, traits: Collection[str]) -> Blueprint:
    """Gemma 4: sliding and full layers have heads of different sizes.

    The last `num_kv_shared_layers` layers read the keys and values of earlier layers and project
    queries only. These layers have no cache and belong to no attention group, unless the engine
    keeps a place for them.
    """
    numbers = layer_numbers(fields)
    hidden = fields.integer("hidden_size")
    layer = f"{path}.layers.*"
    shared_count = fields.integer("num_kv_shared_layers", default=0, minimum=0)
    if shared_count >= len(numbers):
        raise fields.field_error("num_kv_shared_layers", "less than the number of layers")
    first = len(numbers) - shared_count
    width = fields.integer("intermediate_size")
    linears = mlp(f"{layer}.mlp", numbers[:first], hidden, width)
    linears += mlp(
        f"{layer}.mlp",
        numbers[first:],
        hidden,
        width * (2 if fields.flag("use_double_wide_mlp") else 1),
    )
    parameters = embedding_and_head(fields, path, is_tied=True)
    surrounding_names = [
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ]
    groups = []
    is_early = EARLY_GEMMA4 in traits
    for heads in _heads(fields, numbers):
        own_numbers = [number for number in heads.numbers if number < first]
        projecting = heads.numbers if is_early else own_numbers
        linears += _projections(
            heads, hidden, f"{layer}.self_attn", projecting, bias=fields.flag("attention_bias")
        )
        parameters += norms(f"{layer}.self_attn", len(heads.numbers), heads.head_dim, "q_norm")
        parameters += norms(f"{layer}.self_attn", len(projecting), heads.head_dim, "k_norm")
        placed_numbers = heads.numbers if SHARED_LAYERS_HAVE_PLACES in traits else own_numbers
        if placed_numbers:
            groups.append(heads.group(placed_numbers))
    if fields.config.get("num_experts") is not None:
        inputs, inner_groups = _mixture(fields, layer, numbers, hidden, is_early=is_early)
        linears = linears + inputs
        parameters = parameters + inner_groups
        surrounding_names += [
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_1",
            "post_feedforward_layernorm_2",
        ]
    inputs, inner_groups = _layer_inputs(fields, path, numbers, hidden)
    parameters += inner_groups + norms(layer, len(numbers), hidden, *surrounding_names)
    return Blueprint(tuple(linears + inputs), tuple(groups), tuple(parameters))


class _Heads(FrozenRecord, frozen=True):
    """Attention of one kind, in the layers `numbers`."""

    kind: Literal["full", "sliding"]
    numbers: Sequence[int]
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None

    def group(self, layers: Sequence[int]) -> AttentionGroup:
        """The attention group of the layers with a place in the cache."""
        return AttentionGroup(
            kind=self.kind,
            layers=len(layers),
            numbers=tuple(layers),
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            window=self.window,
        )


def _heads(fields: Fields, numbers: Sequence[int]) -> list[_Heads]:
    """Source: Gemma4TextConfig.__post_init__ of transformers; Gemma4DecoderLayer in
    models/gemma4.py:444 of 0.19.1."""
    kinds = fields.config.get("layer_types") or [
        "sliding_attention" if (number + 1) % _FULL_LAYER_INTERVAL else "full_attention"
        for number in numbers
    ]
    layer_types = ("full_attention", "sliding_attention")
    if (
        not isinstance(kinds, list)
        or len(kinds) != len(numbers)
        or not all(kind in layer_types for kind in kinds)
    ):
        raise fields.field_error(
            "layer_types", f"a list of {len(numbers)} times full_attention or sliding_attention"
        )
    full_numbers = [
        number for number in numbers if kinds[number] == "full_attention" or number == numbers[-1]
    ]
    sliding = sorted(set(numbers) - set(full_numbers))
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads")
    head_dim = fields.integer("head_dim", default=256)
    global_heads, global_dim = _full_heads(fields, full_numbers)
    groups = [
        _Heads(
            kind="sliding",
            numbers=sliding,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            window=fields.integer("sliding_window"),
        ),
        _Heads(
            kind="full",
            numbers=full_numbers,
            heads=heads,
            kv_heads=global_heads,
            head_dim=global_dim,
            window=None,
        ),
    ]
    return [kind for kind in groups if kind.numbers]


def _full_heads(fields: Fields, full_numbers: Sequence[int]) -> tuple[int, int]:
    """(KV heads, head size) of the full layers: one value, or one per layer from transformers
    5.19."""
    kv_heads = fields.integer("num_key_value_heads")
    head_dim = fields.integer("head_dim", default=256)
    if fields.config.get("per_layer_config") is None:
        global_heads = (
            fields.integer("num_global_key_value_heads", default=kv_heads)
            if fields.flag("attention_k_eq_v")
            else kv_heads
        )
        return global_heads, fields.integer("global_head_dim", default=512)
    layers = {
        name.lstrip("0") or "0": layer_config
        for name, layer_config in fields.mapping("per_layer_config", {}).items()
    }
    full_heads = set()
    for number in full_numbers:
        layer_fields = layers.get(str(number), {})
        if not isinstance(layer_fields, Mapping):
            raise fields.field_error("per_layer_config", "an object with an object for each layer")
        layer = Fields(layer_fields, fields.source)
        full_heads.add(
            (
                layer.integer("num_key_value_heads", default=kv_heads),
                layer.integer("head_dim", default=head_dim),
            )
        )
    if len(full_heads) != 1:
        raise fields.field_error("per_layer_config", "the same for all layers of full attention")
    return full_heads.pop()


def _projections(
    heads: _Heads, hidden: int, path: str, layers: Sequence[int], *, bias: bool
) -> list[LinearLayer]:
    """The projections: layers in `layers` project keys and values, the rest queries only."""
    query = heads.heads * heads.head_dim
    key = heads.kv_heads * heads.head_dim
    reading = sorted(set(heads.numbers) - set(layers))
    linears = [LinearLayer(f"{path}.o_proj", heads.numbers, query, (hidden,), "row", bias=bias)]
    if layers:
        widths = (query, key, key)
        modules = ("q_proj", "k_proj", "v_proj")
        linears.append(
            LinearLayer(
                name=f"{path}.qkv_proj",
                numbers=layers,
                k=hidden,
                parts=widths,
                shard="qkv",
                modules=modules,
                heads=heads.heads,
                kv_heads=heads.kv_heads,
                bias=bias,
            )
        )
    if reading:
        linears.append(
            LinearLayer(
                f"{path}.q_proj", reading, hidden, (query,), "column", heads=heads.heads, bias=bias
            )
        )
    return linears


def _mixture(
    fields: Fields, layer: str, numbers: Sequence[int], hidden: int, *, is_early: bool
) -> tuple[list[LinearLayer], list[TensorGroup]]:
    """Experts in addition to the MLP of every layer."""
    count = fields.integer("num_experts")
    path = f"{layer}.moe" if is_early else layer
    width = fields.integer("moe_intermediate_size", "expert_intermediate_size")
    linears = [
        router(f"{layer}.router.proj", numbers, hidden, count),
        *experts(path, numbers, hidden, width, count),
    ]
    parameters = [
        tensor(f"{layer}.router.scale", len(numbers), hidden),
        tensor(f"{path if is_early else f'{layer}.router'}.per_expert_scale", len(numbers), count),
    ]
    return linears, parameters


def _layer_inputs(
    fields: Fields, path: str, numbers: Sequence[int], hidden: int
) -> tuple[list[LinearLayer], list[TensorGroup]]:
    """A second, narrow embedding; each layer adds its own part."""
    size = fields.integer("hidden_size_per_layer_input", default=256, minimum=0)
    if not size:
        return [], []
    layer = f"{path}.layers.*"
    count = len(numbers)
    vocab = fields.integer("vocab_size_per_layer_input", default=262144)
    linears = [
        LinearLayer(f"{path}.per_layer_model_projection", (0,), hidden, (count * size,), "column"),
        LinearLayer(f"{layer}.per_layer_input_gate", numbers, hidden, (size,), "replicated"),
        LinearLayer(f"{layer}.per_layer_projection", numbers, size, (hidden,), "replicated"),
    ]
    parameters = [
        tensor(f"{path}.embed_tokens_per_layer.weight", 1, vocab, count * size, shard="vocab")
    ]
    parameters += norms(path, 1, size, "per_layer_projection_norm")
    return linears, parameters + norms(layer, count, hidden, "post_per_layer_input_norm")


VARIED_FAMILIES: Mapping[str, Callable[[Fields, str, str, Collection[str]], Blueprint]] = {
    "gemma4_text": gemma4
}
