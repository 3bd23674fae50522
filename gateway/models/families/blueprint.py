"""The blueprint of a model: layers, attention and parameters before sharding. Pure.

    blueprint: Blueprint = registry.build_blueprint(config)   (one function for each model family)

A blueprint has no quantization: engines/common/layers/build.py adds the scheme of each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gateway.domain import AttentionGroup, TensorGroup
from gateway.domain.record import FrozenRecord

Shard = Literal["column", "merged", "qkv", "row", "replicated", "expert_column", "expert_row"]


class LinearLayer(FrozenRecord, frozen=True):
    """A linear layer of the model.

    modules: last names of the modules that a checkpoint stores for it, where they differ.
    experts: number of experts; 0: an ordinary layer.
    bias: whether the layer has a bias, sharded like its outputs.
    units: the number of units of each part that the ranks share; units repeat where ranks
        outnumber them (1: whole on every rank; 0: any number). (): the numbers follow from `heads`
        and `kv_heads`.
    is_exact: products are float32, and weights too where no kernel multiplies narrower weights so.
    """

    name: str
    numbers: Sequence[int]
    k: int
    parts: tuple[int, ...]
    shard: Shard
    modules: tuple[str, ...] = ()
    is_quantizable: bool = True
    heads: int = 0
    kv_heads: int = 0
    experts: int = 0
    bias: bool = False
    is_exact: bool = False
    units: tuple[int, ...] = ()


class Blueprint(FrozenRecord, frozen=True):
    """All layers and parameters that an engine builds.

    parameters: those outside of linear layers: embeddings, output head, norms, sinks, convolutions.
        The `dtype` of a tensor is a safetensors name ("F32"); "": the model's dtype.
    guessed: the parts that follow only from the names of fields, for an unknown family.
    """

    linears: tuple[LinearLayer, ...]
    attention: tuple[AttentionGroup, ...]
    parameters: tuple[TensorGroup, ...] = ()
    guessed: tuple[str, ...] = ()
