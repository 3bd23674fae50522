"""Bytes and operations of one rank of a plan for a token, layer by layer. Pure.

rank_work(model, stage, rank, kernels, ...) -> RankWork
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from gateway.domain import AttentionGroup, Experts, LayerKernel, ModelSpec, TensorGroup
from gateway.engines.common.kernels.gpus import GpuTable
from gateway.engines.common.layers.built_model import (
    BuiltModel,
    Linear,
    padded_vocab,
    parts,
    rank_shape,
)
from gateway.engines.common.layers.weights import TRAITS, linears_bytes
from gateway.engines.common.memory.kv_cache import stored_bytes
from gateway.engines.common.speed.machine import NO_NAMES, KernelNames, SpeedTable
from gateway.engines.common.speed.work import AttentionWork, Product, RankWork
from gateway.models.rank import Rank
from gateway.models.scheme import Scheme, describe

# Towers compute nothing for a token of text.
_MEDIA = re.compile(
    r"^(model\.)?"
    r"(visual|vision|audio|image|multi_modal|mm_|vit|perceiver|connector|encoder\.vision)"
)
# Heads with at most this many elements leave the units that multiply half empty.
_NARROW_HEAD_ELEMENTS = 64
# Sizes of a key and of a value of one head, in all published models with latents: qk_nope_head_dim
# + qk_rope_head_dim and v_head_dim of DeepSeek-V2 and -V3, Kimi-K2.
_MLA_HEAD = (192, 128)
_ITEM = {"bfloat16": 2, "float16": 2, "float32": 4}


def rank_work_of_kernels(
    spec: ModelSpec,
    stage: BuiltModel,
    rank: Rank,
    layer_kernels: Iterable[LayerKernel],
    gpus: GpuTable | None,
    traits: Iterable[str],
    table: SpeedTable,
) -> RankWork:
    """The work of a model with the kernels of a plan. Plans with equal work share one object, also
    across engine versions with equally fast kernels."""
    kernels = tuple(
        [
            (layer_kernel.layer, layer_kernel.scheme, layer_kernel.kernel or "")
            for layer_kernel in layer_kernels
        ]
    )
    formats = gpus.native_formats(rank.capability) if gpus else frozenset()
    model = Model(spec.hidden, spec.vocab, spec.experts)
    known_traits = frozenset(traits) & TRAITS
    return rank_work(
        model=model,
        stage=stage,
        rank=rank,
        kernels=kernels,
        formats=formats,
        traits=known_traits,
        names=table.names,
    )


class Model(NamedTuple):
    """Properties of a model that its layers do not show."""

    hidden: int
    vocab: int
    experts: Experts | None


@lru_cache(maxsize=256)
def rank_work(
    model: Model,
    stage: BuiltModel,
    rank: Rank,
    kernels: tuple[tuple[str, str, str], ...],
    formats: frozenset[tuple[str, str]],
    traits: frozenset[str] = frozenset(),
    names: KernelNames = NO_NAMES,
) -> RankWork:
    """The work of one rank.

    kernels: layer, scheme, kernel.
    formats: scheme -> format of its products on this GPU; a missing one is 16-bit.
    names: the names of kernels with known speed.

    A layer of unknown size is left out.
    """
    item_bytes = _ITEM[rank.dtype]
    multiplication = _Multiplication(
        rank,
        {(layer, scheme): kernel for layer, scheme, kernel in kernels},
        dict(formats),
        names,
        model.experts.per_token if model.experts else 0,
    )
    sizes = linears_bytes(stage, rank.computing, traits)
    products = []
    for layer, size in zip(stage.linears, sizes, strict=True):
        if _MEDIA.match(layer.name):
            continue
        product = multiplication.product(layer, size)
        if product is not None:
            products.append(product)
    if not stage.is_known:
        products += [
            _tensor(tensor, model.experts, rank, item_bytes)
            for tensor in stage.other_tensors
            if tensor.shard != "vocab"
        ]
    readings = tuple(
        _attention_work(group, rank, item_bytes)
        for group in stage.attention
        if group.kind not in ("vision", "encoder")
    )
    layers = sum(group.layers for group in stage.attention if group.kind != "vision")
    return _work(
        products=tuple(products),
        head=_head_product(model, rank.tp, item_bytes),
        readings=readings,
        layers=layers,
        hidden_bytes=model.hidden * item_bytes,
        ranks=(rank.tp, rank.pp, rank.dp),
    )


@lru_cache(maxsize=256)
def _work(
    products: tuple[Product, ...],
    head: Product,
    readings: tuple[AttentionWork, ...],
    layers: int,
    hidden_bytes: int,
    ranks: tuple[int, int, int],
) -> RankWork:
    """The work as an object, one for equal work. ranks: of tensor parallelism, stages, groups."""
    work = RankWork(products, head, readings, layers, 2 * layers, hidden_bytes, *ranks)
    # Ranks of all groups exchange tokens for experts, instead of a sum within their own.
    return work if work.dp == 1 else work.evolve(all_reduce_count=2 * layers - work.expert_layers)


class _Multiplication(NamedTuple):
    """How one rank multiplies.

    kernels: the kernel of each layer and scheme.
    formats: the formats as in `rank_work`.
    experts_per_token: 0 for a dense model.
    """

    rank: Rank
    kernels: Mapping[tuple[str, str], str]
    formats: Mapping[str, str]
    names: KernelNames
    experts_per_token: int

    def product(self, layer: Linear, size_bytes: int | None) -> Product | None:
        """The work of a layer; None: its size is unknown."""
        rank = self.rank
        scheme = layer.scheme
        cut_sizes = rank_shape(layer, parts(layer, rank))
        if size_bytes is None or cut_sizes is None or not isinstance(scheme, Scheme):
            return None
        k, n = cut_sizes
        kernel = self.kernels.get((layer.name, describe(scheme)), "")
        expert_ranks = rank.ep if layer.experts > 0 and rank.ep > 1 else 1
        experts_read = self.experts_per_token / expert_ranks if layer.experts else 1
        return Product(
            layers=layer.count,
            bytes=size_bytes,
            flops=2.0 * k * n * layer.count * experts_read,
            passed_bytes=float((k + n) * _ITEM[rank.dtype] * layer.count * experts_read),
            number_format=product_format(scheme, kernel, self.formats, rank.dtype),
            kernel=self.names.group(f"{kernel} {scheme.kind}", has_experts=layer.experts > 0),
            experts=layer.experts,
            per_token=self.experts_per_token if layer.experts else 0,
            expert_ranks=expert_ranks,
        )


def product_format(scheme: Scheme, kernel: str, formats: Mapping[str, str], dtype: str) -> str:
    """The format of the products: that of the activations where weights are widened first."""
    widened = scheme.weight_only or "marlin" in kernel.lower() or "emulat" in kernel.lower()
    return dtype if widened else formats.get(scheme.kind, dtype)


def _tensor(tensor: TensorGroup, experts: Experts | None, rank: Rank, item_bytes: int) -> Product:
    """The work of a model of which only the tensors are known: each is a matrix that all tokens, or
    those of an expert, multiply with."""
    elements = (
        math.prod(tensor.shape) * tensor.count / (rank.tp if tensor.shard != "replicated" else 1)
    )
    routed = experts if tensor.shard.startswith("expert") else None
    experts_read = routed.per_token / routed.count if routed else 1.0
    return Product(
        layers=tensor.count // (routed.count if routed and len(tensor.shape) == 2 else 1) or 1,
        bytes=elements * item_bytes,
        flops=2.0 * elements * experts_read,
        passed_bytes=0,
        number_format=rank.dtype,
        kernel="",
        experts=routed.count if routed else 0,
        per_token=routed.per_token if routed else 0,
    )


def _head_product(model: Model, tp: int, item_bytes: int) -> Product:
    elements = padded_vocab(model.vocab) // tp * model.hidden
    return Product(
        layers=1,
        bytes=elements * item_bytes,
        flops=2.0 * elements,
        passed_bytes=0,
        number_format="bfloat16",
        kernel="",
    )


def _attention_work(group: AttentionGroup, rank: Rank, item_bytes: int) -> AttentionWork:
    """Source of the sizes: AttentionGroup; of the parts of each rank: engines/vllm/kv_cache.py."""
    stored_item_bytes = stored_bytes(rank.kv_dtype, item_bytes)
    heads = max(1, group.heads // rank.tp)
    if group.kind == "recurrent" and group.recurrent is not None:
        state = group.recurrent
        state_bytes = state.heads * state.rows * state.columns / rank.tp * 4
        return AttentionWork(0, 0, state_bytes=2.0 * group.layers * state_bytes)
    value = group.value_dim or group.head_dim
    if group.kind == "mla":
        # Prompts are computed with keys and values taken out of the latents.
        taken_out = 2.0 * group.layers * heads * sum(_MLA_HEAD)
        return AttentionWork(
            group.layers * group.head_dim * stored_item_bytes,
            2.0 * group.layers * heads * (group.head_dim + value),
            has_8_bit_cache=stored_item_bytes == 1,
            prompt_flops=taken_out,
        )
    kv_heads = max(1, group.kv_heads // rank.tp)
    return AttentionWork(
        group.layers * kv_heads * (group.head_dim + value) * stored_item_bytes,
        2.0 * group.layers * heads * (group.head_dim + value),
        group.window,
        has_8_bit_cache=stored_item_bytes == 1,
        is_narrow=group.head_dim <= _NARROW_HEAD_ELEMENTS,
    )
