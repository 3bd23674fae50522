"""vLLM's KV cache of models that compress keys by ratios, as DeepSeek V4 does. Pure.

Each layer keeps a window of whole keys. Layers with a ratio keep one key for as many tokens too,
and the float32 states from which the key is made. Layers with the smallest ratio keep keys of an
index. Pages of all kinds share blocks: a block has as many pages of each size as the widest group
of layers. Sources of vLLM 0.26.0: vllm/models/deepseek_v4/attention.py and compressor.py,
vllm/v1/attention/backends/mla/sparse_swa.py, _get_kv_cache_groups_uniform_groups and
_max_memory_usage_bytes_from_groups in vllm/v1/core/kv_cache_utils.py. Blocks of 0.33.0 are about
5 % smaller (_get_packed_kv_cache_groups in vllm/v1/core/kv_cache_planning.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gateway.domain import AttentionGroup
from gateway.engines.vllm.kv_cache import BlockTable, CacheLayout
from gateway.engines.vllm.sparse_memory import config_size

# Tokens of a block of compressed keys, and of whole keys: DeepseekV4FlashMLABackend and
# DeepseekV4SWACache.
_BLOCK = 256
_WINDOW_BLOCK = 64
# Bytes of a key in the layout of FlashMLA: 448 of fp8, 8 of scales and 64 values of 2 bytes.
_PACKED_KEY = 584
# Pages are padded to these: FlashMLA's layout, and rows of plain values.
_PACKED_STEP, _PLAIN_STEP = 576, 512
_FLOAT = 4
# Tokens of a block of states by ratio: CompressorStateCache. A layer with overlapping chunks keeps
# two of them, twice as wide.
_STATE_BLOCKS = {4: 4, 128: 8}
_OVERLAP_RATIO = 4
_INDEX_SCALE = 4


class _StateBlocks(NamedTuple):
    """States of layers with one ratio: their window and block in tokens, and bytes of their
    pages."""

    ratio: int
    layers: int
    window: int
    block: int
    pages: tuple[int, ...]


def compressed_layout(
    config: Mapping[str, Any],
    attention: Sequence[AttentionGroup],
    kv_dtype: str,
    batches: int,
    *,
    drafts: bool = False,
    reserved_blocks: int = 0,
) -> CacheLayout | None:
    """The cache of these layers of the model; None: it compresses no keys, or by other ratios.

    batches: batches in flight.
    drafts: whether a layer that drafts keeps a window too.
    """
    text = config.get("text_config")
    fields = text if isinstance(text, Mapping) else config
    ratios = _ratios(fields, attention)
    key_size = config_size(fields, "head_dim")
    window = config_size(fields, "sliding_window")
    if ratios is None or not key_size or not window:
        return None
    is_packed = kv_dtype == "fp8_ds_mla"
    item_bytes = 1 if kv_dtype.startswith("fp8") else 2
    key_bytes = _PACKED_KEY if is_packed else key_size * item_bytes
    step = _PACKED_STEP if is_packed else _PLAIN_STEP
    index_size = config_size(fields, "index_head_dim")
    index_bytes = index_size + index_size // 128 * _INDEX_SCALE
    counts = {ratio: ratios.count(ratio) for ratio in _STATE_BLOCKS}
    pages = {
        _pad_size(_BLOCK // ratio * key_bytes, step) for ratio, count in counts.items() if count
    }
    pages |= (
        {_pad_size(_BLOCK // _OVERLAP_RATIO * index_bytes, step)}
        if counts[_OVERLAP_RATIO]
        else set()
    )
    states = [
        _states_of(ratio, count, key_size, index_size, step)
        for ratio, count in counts.items()
        if count
    ]
    windows = len(ratios) + drafts
    slots = _slots(max(counts.values()), [windows, *(state.layers for state in states)])
    block_bytes = slots * sum(pages)
    window_page = _pad_size(_WINDOW_BLOCK * key_bytes, step)
    tables = [
        BlockTable("full", max(counts.values()), _BLOCK, block_bytes),
        BlockTable(
            "sliding", windows, _WINDOW_BLOCK, window_page, window, count=-(-windows // slots)
        ),
        *(_state_table(state, slots) for state in states),
    ]
    return CacheLayout(_BLOCK, block_bytes, tuple(tables), batches, reserved_blocks)


def _state_table(state: _StateBlocks, slots: int) -> BlockTable:
    """The table of these layers' states."""
    count = -(-state.layers // slots)
    return BlockTable(
        "sliding", state.layers, state.block, max(state.pages), state.window, count=count
    )


def _ratios(fields: Mapping[str, Any], attention: Sequence[AttentionGroup]) -> list[int] | None:
    """The ratio of each layer; None: config.json has none, or one that is not known."""
    ratios = fields.get("compress_ratios")
    layers = sum(group.layers for group in attention if group.kind == "mla")
    if not isinstance(ratios, list) or len(ratios) < layers:
        return None
    numbers = [number for group in attention for number in group.numbers] or range(layers)
    layer_ratios = [ratios[number] for number in numbers if number < len(ratios)]
    is_known = all(
        type(ratio) is int and (ratio <= 1 or ratio in _STATE_BLOCKS) for ratio in layer_ratios
    )
    return (
        layer_ratios if is_known and any(ratio in _STATE_BLOCKS for ratio in layer_ratios) else None
    )


def _states_of(ratio: int, layers: int, key_size: int, index_size: int, step: int) -> _StateBlocks:
    width = 2 if ratio == _OVERLAP_RATIO else 1
    block = _STATE_BLOCKS[ratio]
    sizes = (key_size, index_size) if ratio == _OVERLAP_RATIO else (key_size,)
    # A state has values and scores.
    pages = tuple(_pad_size(block * 2 * width * size * _FLOAT, step) for size in sizes)
    return _StateBlocks(ratio, layers, width * ratio, block, pages)


def _slots(fewest: int, layers: Sequence[int]) -> int:
    """Layers of a group, where groups of this many pad least, and `fewest` at least.
    _approximate_gcd in vllm/v1/core/kv_cache_utils.py."""
    sizes = [fewest, *layers]
    best_size = min(
        range(fewest, max(sizes) + 1),
        key=lambda size: (sum(-count % size for count in sizes), -size),
    )
    # A group that is not full still reserves all slots of the widest one.
    return max(-(-count // -(-count // best_size)) for count in sizes)


def _pad_size(size: int, step: int) -> int:
    return -(-size // step) * step
