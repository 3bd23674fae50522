"""What an engine builds for a model, as far as config.json fixes it: layers, attention and the
rest, uncut. Pure.

    blueprint: Blueprint = registry.blueprint_of(config)      (one function for each model family)

Quantization is not in it: engines/common/layers/build.py adds the scheme of each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.domain import AttentionGroup, TensorGroup

Shard = Literal["column", "merged", "qkv", "row", "replicated", "expert_column", "expert_row"]


@dataclass(frozen=True)
class Built:
    """A layer of the model: `modules` are the last names of what a checkpoint stores for it, where
    that is not its own.

    `experts` is how many there are of it, 0 for a layer that is not of experts. `bias`: it has one,
    cut as its outputs are. `exact`: its products are float32, and so are its weights where no
    kernel does that with narrower ones.
    """

    name: str
    numbers: Sequence[int]
    k: int
    parts: tuple[int, ...]
    shard: Shard
    modules: tuple[str, ...] = ()
    quantizable: bool = True
    heads: int = 0
    kv_heads: int = 0
    experts: int = 0
    bias: bool = False
    exact: bool = False


@dataclass(frozen=True)
class Blueprint:
    """`others` is every parameter that is not a linear layer's: embeddings, output head, norms,
    sinks, convolutions. Its
    `dtype` is what the engine holds it in: empty for the model's, else a safetensors name ("F32").
    `guessed`: what of it follows from the names of fields alone, as no reader knows the family."""

    linears: tuple[Built, ...]
    attention: tuple[AttentionGroup, ...]
    others: tuple[TensorGroup, ...] = ()
    guessed: tuple[str, ...] = ()
