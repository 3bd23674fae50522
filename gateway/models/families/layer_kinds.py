"""The kind of every layer of an unknown family: attention, recurrent, with experts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from gateway.models.families.config import Fields
from gateway.models.families.field_names import (
    EXPERT_COUNT,
    FIRST_SPARSE_LAYER,
    HEAD_COUNT,
    HIDDEN_SIZE,
    MAX_FACTOR,
    STATE_COLUMNS,
    STATE_HEADS,
)

LayerKind = Literal["full", "sliding", "recurrent", "both", "none"]

_KIND_WORDS: tuple[tuple[str, LayerKind], ...] = (
    *((word, "sliding") for word in ("sliding", "local", "chunked")),
    *((word, "recurrent") for word in ("linear", "mamba", "conv", "recurrent", "delta", "kda")),
    ("hybrid", "both"),
    *((word, "full") for word in ("attention", "global", "full", "*")),
    ("M", "recurrent"),
)
# Names of layers that are only an MLP, and only experts.
_MLP_KINDS = ("-", "mlp")
_EXPERT_KINDS = ("E", "moe")


class _Block(NamedTuple):
    """One layer of a model whose layers differ in size.

    sharing: query heads per KV head; 0: no attention.
    width: width of the MLP; 0: no MLP.
    """

    sharing: int
    width: int


def sized_blocks(fields: Fields, layers: int) -> list[_Block]:
    """The `block_configs` of Nemotron Super and Ultra; empty: the config has none.

    Source: vllm/model_executor/models/nemotron_nas.py of 0.33.0: 60, 134 to 187.
    """
    block_configs = fields.config.get("block_configs")
    if (
        not isinstance(block_configs, list)
        or len(block_configs) != layers
        or not all(isinstance(block, Mapping) for block in block_configs)
    ):
        return []
    return [_block(fields, block) for block in block_configs]


def _block(fields: Fields, config: Mapping[str, Any]) -> _Block:
    attention, mlp = (
        Fields(part if isinstance(part, Mapping) else {}, fields.source)
        for part in map(config.get, ("attention", "ffn"))
    )
    is_absent = attention.flag("no_op") or attention.flag("replace_with_linear")
    sharing = 0 if is_absent else attention.largest(("n_heads_in_group",), default=1)
    factor = mlp.config.get("ffn_mult")
    width = mlp.largest(("intermediate_size",), default=0)
    if isinstance(factor, int | float) and 0 < factor < MAX_FACTOR:
        width = -(-int(2 * factor * fields.largest(HIDDEN_SIZE) / 3) // 256) * 256
    return _Block(sharing, 0 if mlp.flag("no_op") else width)


def group_by_kv_heads(
    fields: Fields, layers: int, attends: Sequence[int]
) -> Iterator[tuple[Fields, list[int]]]:
    """The attention layers grouped by their number of KV heads, each group with its config."""
    blocks = sized_blocks(fields, layers)
    if not blocks and attends:
        yield fields, list(attends)
    for sharing in sorted({block.sharing for block in blocks} - {0}):
        heads = {"num_key_value_heads": max(1, fields.largest(HEAD_COUNT) // sharing)}
        same_sharing = [number for number in attends if blocks[number].sharing == sharing]
        yield Fields({**fields.config, **heads}, fields.source), same_sharing


def is_paired(fields: Fields) -> bool:
    """Whether each layer is a pair with experts in between, as in LongCat."""
    return "zero_expert_num" in fields.config and bool(fields.config.get("kv_lora_rank"))


def layer_kinds(fields: Fields, layers: int) -> list[LayerKind]:
    """The kind of each layer, by the first fields of the config that name it."""
    for reader in (
        _kinds_of_blocks,
        _kinds_of_names,
        _kinds_of_flags,
        _kinds_of_full_layers,
        _kinds_of_chunks,
        _kinds_of_windows,
    ):
        if (kinds := reader(fields, layers)) is not None:
            return kinds
    return [_kind_of_every_layer(fields)] * layers


def _kinds_of_blocks(fields: Fields, layers: int) -> list[LayerKind] | None:
    """The kinds of blocks with sizes of their own, of which some have no attention."""
    blocks = sized_blocks(fields, layers)
    return ["full" if block.sharing else "none" for block in blocks] if blocks else None


def _kinds_of_names(fields: Fields, layers: int) -> list[LayerKind] | None:
    """The kinds by a word or letter for each layer; shorter lists of blocks repeat."""
    for name in (
        "layer_types",
        "layers_block_type",
        "hybrid_override_pattern",
        "block_types",
        "_block_types",
    ):
        codes = fields.config.get(name)
        if not (isinstance(codes, list | str) and codes):
            continue
        if not all(isinstance(code, str) for code in codes):
            continue
        if name.endswith("block_types"):
            codes = [codes[number % len(codes)] for number in range(layers)]
        if len(codes) == layers:
            return [
                next((kind for word, kind in _KIND_WORDS if word in code), "none") for code in codes
            ]
    return None


def _kinds_of_flags(fields: Fields, layers: int) -> list[LayerKind] | None:
    """The kinds by a list of 0 and 1."""
    kinds_of_flags: tuple[tuple[str, LayerKind, LayerKind], ...] = (
        ("hybrid_layer_pattern", "sliding", "full"),
        ("attn_type_list", "full", "recurrent"),
    )
    for name, kind, other_kind in kinds_of_flags:
        flags = fields.config.get(name)
        if isinstance(flags, list) and len(flags) == layers:
            return [kind if flag == 1 else other_kind for flag in flags]
    return None


def _kinds_of_full_layers(fields: Fields, layers: int) -> list[LayerKind] | None:
    """The kinds by the numbers of the layers with full attention; the others are recurrent."""
    full_numbers = _full_layers(fields, layers)
    if full_numbers is None:
        return None
    return ["full" if number in full_numbers else "recurrent" for number in range(layers)]


def _kinds_of_chunks(fields: Fields, layers: int) -> list[LayerKind] | None:
    """The kinds where every n-th layer has no rotary embedding, and the others attend to chunks."""
    if not fields.config.get("attention_chunk_size"):
        return None
    step = max(1, fields.largest(("no_rope_layer_interval",), default=4))
    return ["full" if (number + 1) % step == 0 else "sliding" for number in range(layers)]


def _kinds_of_windows(fields: Fields, layers: int) -> list[LayerKind] | None:
    """The kinds by a pattern such as `LLG`, which repeats: G attends globally, L in a window."""
    pattern = fields.config.get("sliding_window_pattern")
    if not (isinstance(pattern, str) and pattern and fields.config.get("sliding_window")):
        return None
    return [
        "full" if pattern[number % len(pattern)] == "G" else "sliding" for number in range(layers)
    ]


def _kind_of_every_layer(fields: Fields) -> LayerKind:
    """The kind of all layers, by the heads and states that the config names."""
    has_state = any(fields.config.get(name) for name in (*STATE_COLUMNS, *STATE_HEADS))
    has_heads = any(fields.config.get(name) for name in HEAD_COUNT)
    if has_state:
        return "both" if has_heads else "recurrent"
    return "full"


def _full_layers(fields: Fields, layers: int) -> set[int] | None:
    """The attention layers among recurrent layers; None: the config does not say."""
    config = fields.config
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping) and isinstance(linear.get("full_attn_layers"), list):
        return {
            layer_number - 1
            for layer_number in linear["full_attn_layers"]
            if type(layer_number) is int
        }
    for name in ("attn_layer_indices", "full_attn_idxs"):
        if isinstance(config.get(name), list):
            return {layer_number for layer_number in config[name] if type(layer_number) is int}
    if config.get("full_attention_interval"):
        step = fields.integer("full_attention_interval")
        return {number for number in range(layers) if (number + 1) % step == 0}
    if config.get("attn_layer_period"):
        step = fields.integer("attn_layer_period")
        first = fields.integer("attn_layer_offset", default=0, minimum=0)
        return {number for number in range(layers) if number % step == first}
    return None


def layers_without_mixing(config: Mapping[str, Any], layers: int) -> int:
    """The number of layers that are only an MLP or experts (Nemotron-H)."""
    return sum(kind in (*_MLP_KINDS, *_EXPERT_KINDS) for kind in _named_kinds(config, layers))


def _named_kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """The kind of each layer; empty where they are not named one by one."""
    kinds = config.get("hybrid_override_pattern") or config.get("layers_block_type")
    if not isinstance(kinds, list | str) or len(kinds) != layers:
        return []
    return [str(kind) for kind in kinds]


def layers_with_mlp(fields: Fields, layers: int) -> dict[str, list[int]]:
    """The layers with an MLP, and those with experts."""
    numbers = list(range(layers))
    kinds = _named_kinds(fields.config, layers)
    if {*_MLP_KINDS, *_EXPERT_KINDS} & set(kinds):
        return {
            "plain": [number for number in numbers if kinds[number] in _MLP_KINDS],
            "sparse": [number for number in numbers if kinds[number] in _EXPERT_KINDS],
        }
    if not fields.largest(EXPERT_COUNT, default=0) or fields.largest(EXPERT_COUNT, default=0) == 1:
        return {"plain": numbers, "sparse": []}
    sparse_numbers = [number for number in numbers if _is_sparse(fields, number)]
    return {"plain": sorted(set(numbers) - set(sparse_numbers)), "sparse": sparse_numbers}


def _is_sparse(fields: Fields, number: int) -> bool:
    """Whether the layer of this number has experts."""
    config = fields.config
    layer_numbers = config.get("moe_layers") if isinstance(config.get("moe_layers"), list) else None
    if isinstance(listed_numbers := config.get("moe_layers_enum"), str):
        layer_numbers = [
            int(digits)
            for digits in listed_numbers.split(",")
            if digits.strip().isdecimal() and len(digits) < 9
        ]
    if layer_numbers is not None:
        return number in layer_numbers
    for name in ("mlp_layer_types", "moe_layer_freq"):
        flags = config.get(name)
        if isinstance(flags, list) and number < len(flags):
            return flags[number] in ("sparse", "moe", 1)
    dense = config.get("mlp_only_layers")
    if isinstance(dense, list) and number in dense:
        return False
    step = max(
        1,
        fields.largest(
            ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"),
            default=1,
        ),
    )
    if period := fields.largest(("expert_layer_period",), default=0):
        return number % period == fields.largest(("expert_layer_offset",), default=0)
    return number >= fields.largest(FIRST_SPARSE_LAYER, default=0) and (number + 1) % step == 0
