"""Layers of a model in one engine version, with quantization schemes, whole and on one rank. Pure.

rank_shape(layer, tp) -> (k, n)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from gateway.domain import AttentionGroup, TensorGroup
from gateway.domain.record import FrozenRecord
from gateway.engines.common.quantization.block import LayerScheme
from gateway.models.families.blueprint import Shard
from gateway.models.rank import Rank
from gateway.models.scheme import Kind, Scheme, round_up


@dataclass(frozen=True)
class Linear:
    """A linear layer of an engine, or several alike.

    `k` inputs and `n` outputs of the uncut layer; `parts` are the outputs of each module merged
    into it.

    Names are the engine's, with `.w13` (gate and up) and `.w2` (down) for the two products of
    experts, of which there are `experts`. A cut never splits one of `heads`; `kv_heads` are
    repeated where ranks outnumber them. Both are 0 elsewhere. `units` are those of LinearLayer. A
    `bias` is cut as the outputs are: not at all where `shard` cuts the inputs.

    is_exact: its products are float32.
    numbers: the numbers of the model's layers that contain them.
    """

    name: str
    count: int
    k: int
    n: int
    shard: Shard
    parts: tuple[int, ...]
    scheme: LayerScheme
    heads: int = 0
    kv_heads: int = 0
    experts: int = 0
    bias: bool = False
    is_exact: bool = False
    numbers: Sequence[int] = field(default=(), compare=False)
    units: tuple[int, ...] = ()

    def part(self, numbers: Sequence[int]) -> Linear:
        """The linear layer, only in these layers of the model. The constructor of a frozen value
        would set field by field."""
        part = object.__new__(Linear)
        vars(part).update(vars(self), count=len(numbers), numbers=numbers)
        return part


# Compared by identity: engine versions that build alike share one.
class BuiltModel(FrozenRecord, frozen=True, eq=False, dict=True):
    """A model as one engine version builds it.

    other_tensors: parameters outside of linear layers.

    Not `is_known`: the family is unknown, or the config contradicts the checkpoint's shapes. Then
    `other_tensors` has the tensors of the headers, and `linears` is empty.

    assumed: parts of the quantization that config.json leaves open.
    guessed: parts of the layers that only field names suggest.
    """

    linears: tuple[Linear, ...]
    other_tensors: tuple[TensorGroup, ...]
    attention: tuple[AttentionGroup, ...]
    is_known: bool = True
    assumed: str = ""
    guessed: tuple[str, ...] = ()

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """How its layers are quantized, as far as that is known."""
        return frozenset(
            layer.scheme.kind for layer in self.linears if isinstance(layer.scheme, Scheme)
        )


def parts(layer: Linear, rank: Rank) -> int:
    """Parts into which the ranks cut the layer.

    Shared experts are whole in models with groups of several ranks, which then divide the tokens
    among
    themselves: is_sequence_parallel in vllm/model_executor/models/deepseek_v2.py,
    use_sequence_parallel_moe in vllm/config/parallel.py. Models that cut them are counted too high.
    """
    if layer.experts:
        return rank.expert_parts
    is_dealt = rank.dp > 1 and rank.ep > 1 and ".shared_expert" in layer.name
    return 1 if is_dealt else rank.tp


def rank_shape(layer: Linear, tp: int) -> tuple[int, int] | None:
    """(k, n) on one of `tp` ranks, or None where the engine refuses the cut.

    Source: ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
    in vllm/model_executor/layers/linear.py: KV heads are repeated where there are fewer of them
    than ranks.
    """
    if layer.shard == "replicated":
        return layer.k, layer.n
    if layer.shard in ("row", "expert_row"):
        return (layer.k // tp, layer.n) if layer.k % tp == 0 else None
    if layer.heads % tp:
        return None
    if layer.units:
        cut_parts = unit_parts(layer, tp)
        return None if cut_parts is None else (layer.k, sum(cut_parts))
    if layer.shard == "qkv":
        query, key, value = layer.parts
        heads = layer.kv_heads
        if heads % tp if heads >= tp else tp % heads:
            return None
        copy_count = max(1, tp // heads)
        return layer.k, (query + (key + value) * copy_count) // tp
    return (layer.k, layer.n // tp) if all(part % tp == 0 for part in layer.parts) else None


def unit_parts(layer: Linear, tp: int) -> tuple[int, ...] | None:
    """Outputs of each part on one of `tp` ranks by the layer's `units`, or None where they do not
    divide."""
    outputs = []
    for part, units in zip(layer.parts, layer.units, strict=True):
        shares = tp if not units else min(tp, units)
        if (units or part) % shares or tp % shares:
            return None
        outputs.append(part // shares)
    return tuple(outputs)


# Paths of vision towers in the models of both engines.
_TOWERS = ("visual.", "vision_tower.", "vision_model.", "model.vision_model.", "model.visual.")


def is_in_tower(name: str) -> bool:
    """Whether a layer or parameter of this name is in a vision tower."""
    return name.startswith(_TOWERS)


@lru_cache(maxsize=64)  # one object for all variants, as kernels are kept by it
def replicate_tower(built_model: BuiltModel) -> BuiltModel:
    """The model with a vision tower that every rank holds whole."""
    return built_model.evolve(
        linears=tuple(
            replace(layer, shard="replicated") if is_in_tower(layer.name) else layer
            for layer in built_model.linears
        ),
        other_tensors=tuple(
            tensor.evolve(shard="replicated") if is_in_tower(tensor.name) else tensor
            for tensor in built_model.other_tensors
        ),
    )


# Paths of the layers between a tower and the language model.
_CONNECTORS = ("multi_modal_projector.", "embed_vision.")


@lru_cache(maxsize=64)  # one object for all variants, as kernels are kept by it
def drop_tower(built_model: BuiltModel) -> BuiltModel:
    """The model without its vision tower and its connectors."""
    remaining_names = (*_TOWERS, *_CONNECTORS)
    return built_model.evolve(
        linears=tuple(
            layer for layer in built_model.linears if not layer.name.startswith(remaining_names)
        ),
        other_tensors=tuple(
            tensor
            for tensor in built_model.other_tensors
            if not tensor.name.startswith(remaining_names)
        ),
        attention=tuple(group for group in built_model.attention if group.kind != "vision"),
    )


def padded_vocab(rows: int) -> int:
    """Rows of an embedding with the engine's padding. Source:
    vllm/model_executor/layers/vocab_parallel_embedding.py."""
    return round_up(rows, 64)
