"""Memory of a loaded model other than its parameters: tables of positions, unused parts of
segments. Pure.

Sources: get_rope in vllm/model_executor/layers/rotary_embedding (0.32.0) and in
sglang/srt/layers/rotary_embedding/factory.py (0.5.23); kSmallSize and its neighbours in
c10/core/AllocatorConfig.h and get_allocation_size in c10/cuda/CUDACachingAllocator.cpp (PyTorch
2.13).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from gateway.domain import ModelSpec
from gateway.domain.units import MIB
from gateway.engines.common.layers.built_model import BuiltModel, Linear, parts, rank_shape
from gateway.engines.common.layers.weights import linear_bytes, other_bytes
from gateway.engines.common.memory.kv_cache import ITEM_BYTES
from gateway.models.rank import Rank
from gateway.models.scheme import Scheme, round_up

_BLOCK_STEP = 512  # bytes, to a multiple of which each allocation is rounded
_SMALL_BLOCK = MIB
_SMALL_SEGMENT = 2 * MIB
_LARGE_BLOCK = 10 * MIB
_LARGE_SEGMENT = 20 * MIB
_NO_POSITIONS = ("recurrent", "vision", "encoder")


def position_values(spec: ModelSpec, built_model: BuiltModel, stretch: int = 1) -> int:
    """Numbers in the tables of sines and cosines, which every rank holds once for all layers.

    stretch: tables of positions in three dimensions (M-RoPE) are this many times as long.
    """
    text = spec.config.get("text_config")
    fields = text if isinstance(text, Mapping) else spec.config
    rope_fields = fields.get("rope_parameters") or fields.get("rope_scaling")
    ropes: Mapping[str, Any] = rope_fields if isinstance(rope_fields, Mapping) else {}
    is_by_kind = any(isinstance(rope, Mapping) for rope in ropes.values())
    tables = {
        (group.kind if is_by_kind or "rope_local_base_freq" in fields else "", size)
        for group in built_model.attention
        if group.kind not in _NO_POSITIONS
        and (size := group.head_dim - (group.value_dim or 0 if group.kind == "mla" else 0))
    }
    times = stretch if ropes.get("mrope_section") else 1
    # Gemma 4 fills the table up where it turns only a part of a head (gemma4_rope.py).
    share = (
        1.0
        if is_by_kind
        else ropes.get("partial_rotary_factor") or fields.get("partial_rotary_factor")
    )
    part = share if isinstance(share, float) and 0 < share < 1 else 1.0
    return spec.max_position * times * sum(int(size * part) for _, size in tables)


@lru_cache(maxsize=256)
def segment_bytes(built_model: BuiltModel, rank: Rank, table_bytes: int) -> int:
    """Bytes beyond the parameters on one rank, once PyTorch holds them and a table in segments.

    rank: reduced to the fields that matter (`computing`). Only the table of unknown layers counts.
    """
    if not built_model.is_known:
        return table_bytes
    sizes = list(_parameters(built_model, rank))
    return _segments([table_bytes, *sizes]) - sum(sizes)


def _parameters(built_model: BuiltModel, rank: Rank) -> Iterator[int]:
    """The bytes of each parameter, layer by layer."""
    kinds: list[tuple[int, tuple[int, ...]]] = [
        (tensor.count, (other_bytes(tensor, rank.tp, rank.dtype) // max(1, tensor.count),))
        for tensor in built_model.other_tensors
    ]
    kinds += [(layer.count, _block_bytes(layer, rank)) for layer in built_model.linears]
    for number in range(max((count for count, _ in kinds), default=0)):
        for count, sizes in kinds:
            if number < count:
                yield from sizes


def _block_bytes(layer: Linear, rank: Rank) -> tuple[int, int]:
    """The bytes of the weights, and of scales and biases, in one layer of this kind."""
    layer_bytes = (linear_bytes(layer, rank) or 0) // max(1, layer.count)
    shape = rank_shape(layer, parts(layer, rank))
    if shape is None or not isinstance(layer.scheme, Scheme):
        return layer_bytes, 0
    is_plain = layer.scheme.kind == "unquantized"
    bits = 8 * ITEM_BYTES[rank.dtype] if is_plain else layer.scheme.bits
    experts = round_up(layer.experts, rank.ep) // rank.ep if layer.experts else 1
    weights = min(layer_bytes, math.prod(shape) * bits // 8 * experts)
    return weights, layer_bytes - weights


def _segments(sizes: list[int]) -> int:
    """Bytes of the segments that hold blocks of these sizes."""
    total = 0
    free_blocks = {True: list[int](), False: list[int]()}
    for size in sizes:
        block = -(-size // _BLOCK_STEP) * _BLOCK_STEP
        is_small = block <= _SMALL_BLOCK
        blocks = free_blocks[is_small]
        if (index := bisect_left(blocks, block)) < len(blocks):
            block_bytes = blocks.pop(index)
        else:
            large_segment = (
                _LARGE_SEGMENT if block < _LARGE_BLOCK else -(-block // (2 * MIB)) * 2 * MIB
            )
            block_bytes = _SMALL_SEGMENT if is_small else large_segment
            total += block_bytes
        unused_bytes = block_bytes - block
        if unused_bytes >= _BLOCK_STEP if is_small else unused_bytes > _SMALL_BLOCK:
            insort(blocks, unused_bytes)
    return total
