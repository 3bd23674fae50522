"""Layers of one pipeline stage. Pure.

    stage(built_model, engine, kind, architecture, stages) -> the fullest stage of its split
    stage_model(built_model, layers, stage_index, repeated_parts) -> one stage of a split
    heaviest_stage(built_model, layers, repeated_parts) -> the stage with the most bytes of weights

Compared with the layers that the engines build by tests/conformance/golden/stage-*.json and
sglang_stage-*.json.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from math import prod

from gateway.domain import AttentionGroup, Engine, TensorGroup
from gateway.engines.common.kind import EngineKind
from gateway.engines.common.layers.built_model import BuiltModel, Linear

# Stacks whose layers are split, in every family; towers are elsewhere.
_STACKS = ("model.layers.", "language_model.model.layers.")
_LAST_NORMS = ("model.norm", "language_model.model.norm")
# `Engine.every_stage` holds this value instead of names.
EVERY_ARCHITECTURE = "*"
# Models with this weight have separate inputs for each layer. In all published ones, later layers
# also read the KV caches of earlier layers.
_LAYER_INPUTS = "embed_tokens_per_layer.weight"
_HEADS = ("lm_head.weight", "lm_head.weight_scale", "lm_head.bias")


def stage(
    built_model: BuiltModel, engine: Engine, kind: EngineKind, architecture: str, stages: int
) -> BuiltModel:
    """The fullest stage when the engine itself splits the layers."""
    return heaviest_stage(
        built_model,
        split_layers(built_model, kind, stages),
        parts_of_every_stage(engine, architecture),
    )


def split_layers(built_model: BuiltModel, kind: EngineKind, stages: int) -> tuple[int, ...]:
    """Layers of each stage as the engine splits them; one per stage if the depth is unknown."""
    if stages == 1:
        return (1,)
    per_stage, extra = divmod(_depth(built_model) or stages, stages)
    longer = kind.stage_remainder(stages, extra)
    return tuple(per_stage + (stage in longer) for stage in range(stages))


def parts_of_every_stage(engine: Engine, architecture: str) -> frozenset[str]:
    """Parts that every stage has: embedding, head, towers."""
    return frozenset(
        part
        for part, names in engine.every_stage.items()
        if architecture in names or EVERY_ARCHITECTURE in names
    )


def field_against_stages(built_model: BuiltModel, engine: Engine, architecture: str) -> str:
    """The engine's field that rules out stages for the model; "": none."""
    if architecture in engine.no_stages:
        return "no_stages"
    if architecture in engine.no_tied_stages and _has_tied_head(built_model):
        return "no_tied_stages"
    if architecture not in engine.no_layer_input_stages:
        return ""
    return (
        "no_layer_input_stages"
        if any(tensor.name.endswith(_LAYER_INPUTS) for tensor in built_model.other_tensors)
        else ""
    )


@lru_cache(maxsize=256)
def heaviest_stage(
    built_model: BuiltModel, layers: tuple[int, ...], repeated_parts: frozenset[str]
) -> BuiltModel:
    """The stage with the most bytes of weights. Of each kind of attention it has as many layers as
    any stage, since all keep the same tokens."""
    if len(layers) == 1:
        return built_model
    parts = range(len(layers))
    if all(len(numbers) == sum(layers) for numbers, _ in _bits(built_model)[0]):
        # All layers alike: of the stages between none has more than the longest.
        fullest_between = max(parts[1:-1], key=layers.__getitem__, default=0)
        candidate_stages = sorted({0, fullest_between, parts[-1]})
    else:
        candidate_stages = list(parts)
    stage_index = max(
        candidate_stages,
        key=lambda stage_index: _stage_bits(built_model, layers, stage_index, repeated_parts),
    )
    return _stage_part(
        built_model,
        layers,
        stage_index,
        repeated_parts,
        [_max_layers(group, layers) for group in built_model.attention],
    )


@lru_cache(maxsize=256)
def stage_model(
    built_model: BuiltModel,
    layers: tuple[int, ...],
    stage_index: int,
    repeated_parts: frozenset[str],
) -> BuiltModel:
    """Stage number `stage_index` of a split with this many layers each.

    The first stage has the embedding and the towers; the last has head and last norm, and a tied
    embedding. If only the tensors of a model are known, a stage has its share of them.
    repeated_parts: parts that every stage has (`parts_of_every_stage`).
    """
    return _stage_part(
        built_model,
        layers,
        stage_index,
        repeated_parts,
        [
            _layers_on_stage(group, layers, stage_index, repeated_parts)
            for group in built_model.attention
        ],
    )


def _stage_part(
    built_model: BuiltModel,
    layers: tuple[int, ...],
    stage_index: int,
    repeated_parts: frozenset[str],
    attending: Sequence[int],
) -> BuiltModel:
    """attending: how many layers it has of each kind of attention."""
    linears = []
    other_tensors = []
    for layer in built_model.linears:
        numbers = _stage_layer_numbers(layer, layers, stage_index, repeated_parts)
        if numbers:
            linears.append(layer.part(numbers))
    tied = _has_tied_head(built_model)
    for tensor in built_model.other_tensors:
        if tensor.shard != "vocab" and (
            tensor.name.startswith(_STACKS) or not built_model.is_known
        ):
            stage_group = tensor.evolve(count=_share(tensor.count, layers, stage_index))
            other_tensors.append(stage_group)
        elif _is_at_end(tensor, layers, stage_index, repeated_parts, tied):
            other_tensors.append(tensor)
    attention = tuple(
        [
            _replace_layers(group, count)
            for group, count in zip(built_model.attention, attending, strict=True)
        ]
    )
    return BuiltModel(
        linears=tuple(linears),
        other_tensors=tuple(other_tensors),
        attention=attention,
        is_known=built_model.is_known,
        assumed=built_model.assumed,
        guessed=built_model.guessed,
    )


@lru_cache(maxsize=64)
def _has_tied_head(built_model: BuiltModel) -> bool:
    return not any(tensor.name.endswith(_HEADS) for tensor in built_model.other_tensors)


def _is_at_end(
    tensor: TensorGroup,
    layers: Sequence[int],
    stage_index: int,
    repeated_parts: frozenset[str],
    is_tied: bool,
) -> bool:
    """Whether the stage has this parameter, which is in none of the layers."""
    first = stage_index == 0
    last = stage_index == len(layers) - 1
    if tensor.name.endswith(_HEADS):
        return last or "head" in repeated_parts
    if tensor.shard == "vocab":
        return first or (last and is_tied) or "embedding" in repeated_parts
    return last if tensor.name.startswith(_LAST_NORMS) else first or "towers" in repeated_parts


def _stage_layer_numbers(
    layer: Linear, layers: Sequence[int], stage_index: int, repeated_parts: frozenset[str]
) -> Sequence[int]:
    """Numbers of this layer that the stage has."""
    if not layer.name.startswith(_STACKS):
        return layer.numbers if stage_index == 0 or "towers" in repeated_parts else ()
    return _numbers_of_stage(layer.numbers, layers, stage_index)


def _layers_on_stage(
    group: AttentionGroup, layers: Sequence[int], stage_index: int, repeated_parts: frozenset[str]
) -> int:
    """How many layers of this kind the stage has."""
    if group.kind == "vision":
        return group.layers if stage_index == 0 or "towers" in repeated_parts else 0
    return (
        len(_numbers_of_stage(group.numbers, layers, stage_index))
        if group.numbers
        else _share(group.layers, layers, stage_index)
    )


def _max_layers(group: AttentionGroup, layers: Sequence[int]) -> int:
    """How many layers of this kind any stage has at most."""
    if group.kind == "vision":
        return group.layers
    longest_stage = max(range(len(layers)), key=layers.__getitem__)
    parts = range(len(layers)) if group.numbers else (longest_stage,)
    return max(_layers_on_stage(group, layers, stage_index, frozenset()) for stage_index in parts)


def _numbers_of_stage(
    numbers: Sequence[int], layers: Sequence[int], stage_index: int
) -> Sequence[int]:
    start = sum(layers[:stage_index])
    return numbers[bisect_left(numbers, start) : bisect_left(numbers, start + layers[stage_index])]


def _share(count: int, layers: Sequence[int], stage_index: int) -> int:
    """The most layers of one kind in a stage of this length, where their places are unknown."""
    return -(-count * layers[stage_index] // sum(layers))


def _replace_layers(group: AttentionGroup, layers: int) -> AttentionGroup:
    stage_group = group.evolve(layers=layers)
    return group if layers == group.layers else stage_group


def _stage_bits(
    built_model: BuiltModel, layers: Sequence[int], stage_index: int, repeated_parts: frozenset[str]
) -> float:
    """Bits of the stage's weights, as nearly as it takes to compare stages."""
    stacked_bits, towers, ends = _bits(built_model)
    total_bits = towers if stage_index == 0 or "towers" in repeated_parts else 0
    for numbers, bits in stacked_bits:
        total_bits += bits * len(_numbers_of_stage(numbers, layers, stage_index))
    tied = _has_tied_head(built_model)
    return total_bits + sum(
        bits
        for tensor, bits in ends
        if _is_at_end(tensor, layers, stage_index, repeated_parts, tied)
    )


@lru_cache(maxsize=64)
def _depth(built_model: BuiltModel) -> int:
    """The number of its layers; 0: unknown."""
    return max(
        (layer.numbers[-1] + 1 for layer in built_model.linears if layer.name.startswith(_STACKS)),
        default=0,
    )


@lru_cache(maxsize=64)
def _bits(
    built_model: BuiltModel,
) -> tuple[tuple[tuple[Sequence[int], float], ...], float, tuple[tuple[TensorGroup, int], ...]]:
    """Weights in three groups: by the set of layers that have them, for one such layer; of all
    towers; by parameter, outside of layers."""
    stacked_bits: dict[Sequence[int], float] = {}
    towers = 0.0
    for layer in built_model.linears:
        layer_bits = max(1, layer.experts) * layer.k * layer.n * getattr(layer.scheme, "bits", 16)
        if layer.name.startswith(_STACKS):
            numbers = tuple(layer.numbers)
            stacked_bits[numbers] = stacked_bits.get(numbers, 0) + layer_bits
        else:
            towers += layer_bits * len(layer.numbers)
    ends = [
        (tensor, 16 * tensor.count * prod(tensor.shape))
        for tensor in built_model.other_tensors
        if not tensor.name.startswith(_STACKS)
    ]
    return tuple(stacked_bits.items()), towers, tuple(ends)
