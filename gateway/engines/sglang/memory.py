"""SGLang's default sizes, and the effect of its memory settings. Pure.

MemoryRules (profiles/engines/sglang/VERSION/memory.yaml) + GPU + model -> StaticMemory -> bytes and
tokens of KV cache

`--mem-fraction-static` is the share for only weights and KV cache; activations and graphs must fit
into the rest. By default SGLang takes the results of these functions (0.5.10.post1:
srt/server_args.py:1141, 0.5.23: srt/arg_groups/memory_hook.py:46).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from gateway.domain import AttentionGroup, KnownChoice, Value
from gateway.domain.base import Field
from gateway.domain.units import MIB
from gateway.engines.common.rules.check import Check

_GIB_IN_MIB = 1024
# CUDA context and torch.distributed: 0.5.15.post1 found 139.09 GiB free on an H200 that had 139.80
# (benchmarks/notebook/performance.md). Before Hopper it is smaller: public logs of 0.5.13.post1 on
# an RTX 4090 D (23.09 GiB before loading) and of a version of 2026-09 on an A100 of 80 GiB (78.7).
_PROCESS = 728 * MIB
_AMPERE_PROCESS = 560 * MIB
# Several ranks also need memory for NCCL. Measured with vLLM on two H200; SGLang was not measured
# there. On two RTX 4090 without peer access SGLang took 0.19 GiB in all: a public log of
# 2026-04-14.
_NCCL = 1024 * MIB
_NCCL_THROUGH_HOST = 192 * MIB
# A vision tower of this size (ViT-L/14) leaves 95 % of the share; each further one of its size
# takes 10 % more.
_VIT_LAYERS = 24
_VIT_HIDDEN_SIZE = 1024
# Elements of an FP8 row that share a scale, and bytes of a scale: quant_block_size of
# DSATokenToKVPool in srt/mem_cache/memory_pool.py.
SCALED_BLOCK = 128
SCALE_BYTES = 4
# Graphs for larger batches take half as much again, where attention is data parallel.
_MANY_GRAPHS = 300


class MemoryClass(Value):
    """SGLang's defaults for GPUs with less than `below_gib` of memory (None: for all larger
    ones)."""

    below_gib: int | None
    chunked_prefill: int = Field(description="tokens of one prefill batch")
    graph_batch: int = Field(description="largest batch of decoding that gets a CUDA graph")
    graph_batch_from_tp4: int


class MemoryRules(Value):
    """The rules of profiles/engines/sglang/VERSION/memory.yaml."""

    source: str = ""
    classes: tuple[MemoryClass, ...] = Field(min_length=1)
    graph_batch_within_seqs: bool = Field(
        description="no graphs for more requests than --max-running-requests"
    )
    eager_reserves_graphs: bool = Field(
        description="--disable-cuda-graph leaves as much aside as if there were graphs"
    )
    swa_ratio: float = Field(
        description="tokens in the pool of sliding layers, as a share of those in the full pool"
    )
    hybrid_swa: tuple[str, ...] = Field(
        description="architectures whose sliding layers have such a pool; others keep all tokens"
    )
    mamba_ratio: float = Field(
        description="bytes of recurrent states, as a share of those of the KV cache"
    )
    state_slots: int = Field(3, description="states of recurrent layers for each running request")
    buffered_slots: int = Field(2, description="further ones where states are buffered")
    buffered_states: tuple[str, ...] = Field(
        (), description="architectures whose states are buffered by default"
    )
    multimodal: tuple[str, ...] = Field(
        description="architectures that it takes for multimodal whatever their config says"
    )
    text_only: tuple[str, ...] = Field(description="architectures whose towers it leaves out")
    multimodal_prefill_graphs: tuple[str, ...] = Field(
        (), description="multimodal ones whose prefill gets CUDA graphs"
    )
    attention_dp: tuple[str, ...] = Field(
        (), description="architectures with experts whose attention can be data parallel"
    )
    no_prefill_graphs: tuple[str, ...] = Field((), description="others whose prefill gets none")
    scaled_latents: tuple[Check, ...] = Field(
        (), description="sparse attention whose FP8 latents have scales and a 16-bit part (any of)"
    )
    shares_index: bool = Field(
        False, description="layers that reuse the tokens chosen by another keep no keys of an index"
    )

    def add_choices(
        self, choices: Iterable[KnownChoice], other_rules: Mapping[str, MemoryRules]
    ) -> MemoryRules:
        """These rules with settings of the version's own code. other_rules: by version."""
        changes: dict[str, Any] = {}
        for choice in choices:
            if choice.rules is not None:
                source_rules = other_rules[choice.rules]
                changes |= {name: getattr(source_rules, name) for name in choice.fields}
            changes |= choice.values
        return self.evolve(**changes)


class ModelTraits(Value):
    """Properties that these settings depend on. `has_towers`: config.json has a text_config, so the
    model is more than text."""

    architecture: str
    uses_mla: bool = Field(False, alias="mla")
    has_towers: bool = Field(False, alias="towers")
    has_vision: bool = Field(
        False,
        description="config.json has a vision_config; the sizes are as it gives them",
        alias="vision",
    )
    vision_layers: int | None = None
    vision_hidden: int | None = None


class StaticMemory(Value):
    """The default sizes of SGLang on a GPU.

    `fraction` of the memory that is free before loading goes to weights and KV cache
    (--mem-fraction-static).
    """

    chunked_prefill: int
    graph_batch: int
    reserved_mib: float
    fraction: float


def static_memory(
    rules: MemoryRules,
    gpu_mib: float,
    model: ModelTraits,
    *,
    tp: int,
    pp: int = 1,
    dp: int = 1,
    seqs: int | None = None,
    chunked_prefill: int | None = None,
    graphs: int | None = None,
    is_eager: bool = False,
) -> StaticMemory:
    """The engine's own choice for a GPU of `gpu_mib` (the smallest, as nvidia-smi prints it).

    `tp` counts the ranks of all `dp` groups. `seqs`, `chunked_prefill` and `graphs`, the largest
    batch with a graph, are set by flags; `is_eager` is --disable-cuda-graph.
    """
    chunk = chunked_prefill or _memory_class(rules, gpu_mib).chunked_prefill
    graphs = graphs or graph_batch(rules, gpu_mib, tp=tp, seqs=seqs)
    reserved = 512 + max(chunk, 2048) * 1.5 + tp * pp / 8 * 1024
    if not is_eager or rules.eager_reserves_graphs:
        reserved += graphs * 2
        if has_prefill_graphs(rules, model, pp):
            reserved += 1.5 * 1024 if model.uses_mla else 8 * len(prefill_graph_sizes(chunk))
    if dp > 1:
        # srt/server_args.py:1294 (0.5.10.post1), srt/arg_groups/memory_hook.py:370 (0.5.23).
        reserved += graphs * dp * (4.5 if graphs > _MANY_GRAPHS else 3)
    if gpu_mib > 60 * _GIB_IN_MIB:
        reserved = max(reserved, 10 * 1024)
    fraction = round((gpu_mib - reserved) / gpu_mib, 3)
    if model.has_vision and has_towers(rules, model):
        fraction *= _vision_factor(model)
    return StaticMemory(
        chunked_prefill=chunk, graph_batch=graphs, reserved_mib=reserved, fraction=fraction
    )


def graph_batch(rules: MemoryRules, gpu_mib: float, *, tp: int, seqs: int | None) -> int:
    """The largest batch of decoding that gets a CUDA graph by the engine's own choice."""
    memory_class = _memory_class(rules, gpu_mib)
    graphs = memory_class.graph_batch if tp < 4 else memory_class.graph_batch_from_tp4
    return min(graphs, seqs) if rules.graph_batch_within_seqs and seqs is not None else graphs


def _memory_class(rules: MemoryRules, gpu_mib: float) -> MemoryClass:
    return next(
        size
        for size in rules.classes
        if size.below_gib is None or gpu_mib < size.below_gib * _GIB_IN_MIB
    )


def has_prefill_graphs(rules: MemoryRules, model: ModelTraits, pp: int) -> bool:
    """Whether prefill runs in CUDA graphs, which need room of their own."""
    if pp > 1 or model.architecture in rules.no_prefill_graphs:
        return False
    return not has_towers(rules, model) or model.architecture in rules.multimodal_prefill_graphs


def has_towers(rules: MemoryRules, model: ModelTraits) -> bool:
    """srt/configs/model_config.py:188 (0.5.10.post1), :820 (0.5.23)."""
    is_multimodal = model.has_towers or model.architecture in rules.multimodal
    return is_multimodal and model.architecture not in rules.text_only


@lru_cache(maxsize=32)
def prefill_graph_sizes(largest_size: int) -> tuple[int, ...]:
    """The token counts that get a prefill graph (srt/server_args.py:1397,
    srt/arg_groups/cuda_graph_hook.py:480)."""
    steps = (
        (4, 33, 4),
        (48, 257, 16),
        (288, 513, 32),
        (576, 1025, 64),
        (1280, 4097, 256),
        (4608, largest_size + 1, 512),
    )
    return tuple(size for step in steps for size in range(*step) if size <= largest_size)


def _vision_factor(model: ModelTraits) -> float:
    layers = _VIT_LAYERS if model.vision_layers is None else model.vision_layers
    hidden = _VIT_HIDDEN_SIZE if model.vision_hidden is None else model.vision_hidden
    relative_size = layers * hidden**2 / (_VIT_LAYERS * _VIT_HIDDEN_SIZE**2)
    return 0.95 * max(0.8, min(1.05, 1.0 - 0.1 * (relative_size - 1.0)))


def process_bytes(ranks: int, capability: str, *, copies_through_host: bool = False) -> int:
    """Bytes that a rank's process takes of its GPU before SGLang reads the free memory, which the
    static fraction refers to."""
    nccl_bytes = _NCCL_THROUGH_HOST if copies_through_host else _NCCL
    context = _AMPERE_PROCESS if capability.startswith("8.") else _PROCESS
    return context + (nccl_bytes if ranks > 1 else 0)


def fraction_within(static: StaticMemory, free_bytes: int) -> float:
    """--mem-fraction-static for an engine that finds `free_bytes` before it loads: never more than
    its own choice, and as much less as
    others take. Rounded down to three digits; 0 where nothing is left."""
    share = (free_bytes - static.reserved_mib * MIB) / free_bytes
    return max(0.0, math.floor(min(static.fraction, share) * 1000) / 1000)


def kv_tokens(
    rules: MemoryRules,
    attention: Iterable[AttentionGroup],
    pool_bytes: int,
    *,
    tp: int,
    element_bytes: int,
    page: int = 1,
    states_bytes: int | None = None,
) -> int | None:
    """Tokens of the full KV pool on one rank; None where these rules do not know (the index of
    layers without a latent).

    Sliding layers get a pool of their own of `swa_ratio` of the tokens. Recurrent ones get
    `states_bytes`, or (None) a share of the bytes.
    """
    groups = [group for group in attention if group.kind not in ("encoder", "vision")]
    if any(group.index_dim and group.kind != "mla" for group in groups):
        return None
    if any(group.kind == "recurrent" for group in groups):
        share = math.floor(pool_bytes / (1 + rules.mamba_ratio))
        pool_bytes = share if states_bytes is None else max(0, pool_bytes - states_bytes)
    full_bytes = sum(
        _bytes_per_token(group, tp, element_bytes)
        for group in groups
        if group.kind in ("full", "mla")
    )
    sliding = sum(
        _bytes_per_token(group, tp, element_bytes) for group in groups if group.kind == "sliding"
    )
    cell = full_bytes + sliding * rules.swa_ratio if full_bytes else sliding
    return math.floor(pool_bytes / cell) // page * page if cell else None


def _bytes_per_token(group: AttentionGroup, tp: int, element_bytes: int) -> int:
    if group.kind == "mla":
        index = group.index_dim or 0
        # Keys of an indexer are FP8, with a float32 scale for every block.
        keys = index + index // SCALED_BLOCK * SCALE_BYTES
        return group.layers * (group.head_dim * element_bytes + keys)
    return (
        group.layers
        * max(1, group.kv_heads // tp)
        * (group.head_dim + (group.value_dim or group.head_dim))
        * element_bytes
    )
