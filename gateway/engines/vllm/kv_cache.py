"""vLLM's cache of a sequence: keys and values, latents, recurrent states; and the number of
sequences that fit.

vLLM gives every layer pages of one size from one pool. Layers that keep the same are divided into
groups of one size; a block of the pool is one page in every layer of a group, and each group has
its own table of blocks for each request. Sizes are of one rank. Sources:
vllm/v1/kv_cache_interface.py, vllm/v1/core/kv_cache_utils.py (0.33.0: kv_cache_planning.py),
vllm/platforms/interface.py (_align_hybrid_block_size; until 0.19.1 HybridAttentionMambaModelConfig
in vllm/model_executor/models/config.py).

Differences between versions stand in the traits of their profiles:

* windows_of_more_batches: in addition to a window all batches in flight are kept, two and more with
  pipeline parallelism, not one
* pages_are_padded: attention whose page does not divide the largest page gets a padded page;
  without it such a model is refused
* states_at_every_block: with prefix caching, mamba layers keep a state for every block of a
  sequence
* states_within_prefill: with prefix caching, kernels that can leave a state within a prefill keep a
  third one for it
* prefixes_of_states: prefix caching is on by default for models with recurrent layers
* null_block: the check whether a request fits sets aside the block that stands for "none"
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal

from gateway.domain import AttentionGroup, Recurrent
from gateway.domain.record import FrozenRecord
from gateway.engines.common.memory import states
from gateway.engines.common.memory.kv_cache import (
    ITEM_BYTES,
    SCALED_END,
    longest,
    stored_bytes,
)
from gateway.models.rank import Rank

# One token in the layout of FlashMLA's sparse kernels: 512 bytes of fp8, 4 float32 scales, 64
# rotary values of 2 bytes. Sources: MLAAttentionSpec in vllm/v1/kv_cache_interface.py;
# vllm/v1/attention/backends/mla/flashmla_sparse.py
_DS_MLA_BYTES = 656
# One float32 follows the keys, and one the values, of a head. TritonAttentionBackend,
# customize_spec in vllm/v1/attention/backends/triton_attn.py (0.33.0:308).
_SCALE_BYTES = 4
# Convolutions of these kinds keep the inputs of drafted tokens too: num_spec of
# MambaStateShapeCalculator in vllm/model_executor/layers/mamba/mamba_utils.py (0.26.0:171-245,
# 0.33.0:195-304).
_DRAFTED_KINDS = ("gdn", "kda", "mamba2")
# FlashInfer's delta rule can leave a state at multiples of this many tokens. vllm 0.33.0,
# v1/attention/backends/gdn_attn.py:34
_DELTA_STEP = 64


class BlockTable(FrozenRecord, frozen=True):
    """Layers with equal content: `count` tables of blocks, each for one group of layers.

    A full layer keeps every token; a sliding one keeps its window and the tokens in flight. A cross
    one keeps the encoder's input, at most a batch. A state is one block, `states` times, or (0) one
    for every block of tokens; each of `drafts` drafted tokens has a further one.
    """

    kind: Literal["full", "sliding", "cross", "state"]
    layers: int
    block: int
    page: int
    window: int = 0
    states: int = 0
    drafts: int = 0
    count: int = 1

    def blocks(self, length: int, batch: int, batches: int) -> int:
        """Blocks of all these tables for one request, with `batches` of `batch` tokens in flight.

        SlidingWindowSpec: one more, since a window may start within a block. CrossAttentionSpec:
        max_num_encoder_input_tokens, which is a batch.
        """
        if self.states:
            return self.count * (self.states + self.drafts)
        if self.kind == "sliding":
            kept_tokens = min(self.window - 1 + batches * batch, length)
            return self.count * (-(-kept_tokens // self.block) + 1)
        if self.kind == "cross":
            return self.count * -(-batch // self.block)
        return self.count * (-(-length // self.block) + self.drafts)


class CacheLayout(FrozenRecord, frozen=True):
    """The KV cache of one rank. `refusal`: the reason that this version cannot hold these layers in
    one pool."""

    block_tokens: int
    block_bytes: int
    tables: tuple[BlockTable, ...]
    batches: int
    reserved_blocks: int
    refusal: str | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one more token in a long request, or within the window if every layer has one;
        0: no growth."""
        growing = [
            table
            for table in self.tables
            if table.kind not in ("sliding", "cross") and not table.states
        ]
        growing = growing or [table for table in self.tables if table.kind == "sliding"]
        return sum([-(-table.count * self.block_bytes // table.block) for table in growing])

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence before its first token."""
        states = sum(table.count * (table.states + table.drafts) for table in self.tables)
        return states * self.block_bytes

    @property
    def states_per_request(self) -> int:
        """CUDA graphs of decoding need a block for each request.
        resolve_cudagraph_mode_and_sizes in vllm/config/compilation.py; 0.18.0 captures fewer."""
        return int(any(table.kind == "state" for table in self.tables))

    def states(self, kv_bytes: int) -> int:
        return self.blocks(kv_bytes)

    def blocks_for(self, length: int, batched_tokens: int) -> int:
        return sum([table.blocks(length, batched_tokens, self.batches) for table in self.tables])

    def bytes_for(self, length: int, batched_tokens: int) -> int:
        """Bytes of one request of `length` tokens in whole blocks, as the engine reserves them."""
        return self.blocks_for(length, batched_tokens) * self.block_bytes

    def blocks(self, kv_bytes: int) -> int:
        """The engine's number of blocks, the null block with them."""
        return kv_bytes // self.block_bytes if self.block_bytes else 0

    def largest(self, kv_bytes: int, batched_tokens: int, limit: int) -> int:
        """The longest request (at most `limit` tokens) that fits into `kv_bytes`; 0 when not even
        one token does.

        The engine's own estimate, except of 0.18.0 where kinds mix: it counts the first group
        alone, and would wait for ever.
        """
        if not self.tables:
            return limit
        capacity = self.blocks(kv_bytes) - self.reserved_blocks
        return longest(limit, lambda length: self.blocks_for(length, batched_tokens) <= capacity)

    def requests(self, kv_bytes: int, length: int, batched_tokens: int) -> float:
        """How many requests of `length` tokens fit, the engine's "Maximum concurrency"; infinite
        where nothing is kept."""
        blocks_needed = self.blocks_for(length, batched_tokens)
        return self.blocks(kv_bytes) / blocks_needed if blocks_needed else math.inf


def stored_dtype(kv_dtype: str, backend: str) -> str:
    """How this attention backend stores a KV cache of this dtype.
    _canonicalize_sparse_mla_kv_cache_dtype in
    vllm/model_executor/layers/attention/mla_attention.py."""
    if backend == "FLASHINFER_MLA_SPARSE_SM120":
        return "fp8_ds_mla" if kv_dtype in ("auto", "fp8", "fp8_e4m3") else kv_dtype
    is_packed = backend in ("FLASHMLA_SPARSE", "FLASHMLA_SPARSE_DSV4")
    return "fp8_ds_mla" if is_packed and kv_dtype.startswith("fp8") else kv_dtype


def batches_in_flight(rank: Rank, traits: Collection[str], *, is_overlapped: bool) -> int:
    """Batches whose tokens a window keeps too. max_concurrent_batches in vllm/config/vllm.py
    (0.33.0:588)."""
    return rank.pp + is_overlapped if "windows_of_more_batches" in traits else 1


def blocks_set_aside(traits: Collection[str]) -> int:
    """Blocks that the check whether a request fits leaves out."""
    return 1 if "null_block" in traits else 0


def plan_cache_layout(
    attention: Sequence[AttentionGroup],
    rank: Rank,
    block: int,
    traits: Collection[str],
    *,
    caches_prefixes: bool | None = None,
    drafts: int = 0,
    is_overlapped: bool = True,
) -> CacheLayout:
    """The cache of these layers, which are those of one stage of `rank.pp`.

    rank.kv_dtype: auto (as `dtype`), fp8 and its kinds, a kind with a scale for each head, or
    fp8_ds_mla for backends with that layout.

    block: tokens of a block that the attention backend prefers.
    caches_prefixes: prefix caching; None: the version's default.
    drafts: drafted tokens of a step.
    is_overlapped: whether a batch is scheduled while another one runs.
    """
    tp = rank.tp
    dtype = rank.dtype
    layer_tables = _attention_tables(attention, tp, dtype, rank.kv_dtype, block)
    stateful = [
        group
        for group in attention
        if group.kind == "recurrent" and group.recurrent is not None and group.layers
    ]
    if caches_prefixes is None:
        caches_prefixes = not stateful or "prefixes_of_states" in traits
    state = max(
        (state_bytes(group.recurrent, tp, dtype, drafts) for group in stateful if group.recurrent),
        default=0,
    )
    if state > 0:
        layer_tables = _grow_blocks(
            layer_tables, stateful, state, block, traits, rank.capability, caches_prefixes
        )
    if drafts:
        layer_tables = _add_draft_states(layer_tables, drafts)
    batches = batches_in_flight(rank, traits, is_overlapped=is_overlapped)
    blocks_aside = blocks_set_aside(traits)
    merged_tables = _merge_layers(layer_tables)
    if len({(table.kind, table.window, table.block) for table in merged_tables}) <= 1:
        # UniformTypeKVCacheSpecs: one group, each layer with a page of its own size.
        total = sum(table.layers * table.page for table in merged_tables)
        first_block = merged_tables[0].block if merged_tables else block
        return CacheLayout(first_block, total, merged_tables[:1], batches, blocks_aside)
    pages = _one_page(merged_tables, "pages_are_padded" in traits)
    size = _group_size([table.layers for table in merged_tables])
    tables = tuple(table.evolve(count=-(-table.layers // size)) for table in pages)
    token_block = next((table.block for table in tables if table.kind == "full"), tables[0].block)
    page_bytes = size * max(table.page for table in tables)
    refusal = _page_refusal(tables)
    return CacheLayout(token_block, page_bytes, tables, batches, blocks_aside, refusal)


def _add_draft_states(tables: Sequence[BlockTable], drafts: int) -> list[BlockTable]:
    """The tables, with a state for each token of a step that verifies drafts.
    num_speculative_blocks in vllm/model_executor/layers/mamba/abstract.py."""
    return [table.evolve(drafts=drafts) if table.kind == "state" else table for table in tables]


def _page_refusal(tables: Sequence[BlockTable]) -> str | None:
    """The reason against pages of several sizes; None: they have one."""
    if len({table.page for table in tables}) <= 1:
        return None
    pages = ", ".join(str(table.page) for table in tables)
    return f"pages of {pages} bytes do not divide each other"


def _attention_tables(
    attention: Sequence[AttentionGroup], tp: int, dtype: str, kv_dtype: str, block: int
) -> list[BlockTable]:
    """Tables of growing content: keys and values of one rank's heads (one repeated head, if heads
    are fewer than ranks), or a latent and the indexer's keys, whole on every rank."""
    item_bytes = stored_bytes(kv_dtype, ITEM_BYTES[dtype])
    scale_bytes = _SCALE_BYTES if kv_dtype.endswith(SCALED_END) else 0
    tables = []
    for group in attention:
        if group.kind == "mla":
            latent = _DS_MLA_BYTES if kv_dtype == "fp8_ds_mla" else group.head_dim * item_bytes
            tables.append(BlockTable("full", group.layers, block, int(block * latent)))
            if group.index_dim:
                # fp8 and a float32 scale for 128 values. DeepseekV32IndexerCache in
                # vllm/model_executor/models/deepseek_v2.py
                tables.append(
                    BlockTable(
                        "full",
                        group.layers,
                        block,
                        block * (group.index_dim + group.index_dim // 128 * 4),
                    )
                )
        elif group.kind in ("full", "sliding", "cross"):
            value = group.head_dim if group.value_dim is None else group.value_dim
            token = int((group.head_dim + value) * item_bytes) + 2 * scale_bytes
            page = block * max(1, group.kv_heads // tp) * token
            if group.kind == "sliding" and group.window:
                tables.append(BlockTable("sliding", group.layers, block, page, group.window))
            else:
                kind: Literal["full", "cross"] = "cross" if group.kind == "cross" else "full"
                tables.append(BlockTable(kind, group.layers, block, page))
            if group.index_dim:  # only keys, as MiniMaxM3IndexerCache
                index_page = int(block * group.index_dim * item_bytes)
                tables.append(BlockTable("full", group.layers, block, index_page))
    return [table for table in tables if table.layers > 0 and table.page > 0]


def state_bytes(recurrent: Recurrent, tp: int, dtype: str, drafts: int = 0) -> int:
    """Bytes of the state that one recurrent layer keeps of a sequence on one rank, unpadded.

    drafts: drafted tokens of a step.

    Source: MambaStateShapeCalculator and MambaStateDtypeCalculator in
    vllm/model_executor/layers/mamba/mamba_utils.py.
    """
    matrices = recurrent.dtype or ("float32" if recurrent.kind == "kda" else dtype)
    if drafts and recurrent.kind in _DRAFTED_KINDS:
        recurrent = recurrent.evolve(conv_kernel=recurrent.conv_kernel + drafts)
    return states.state_bytes(recurrent, tp, inputs=dtype, matrices=matrices)


def _grow_blocks(
    tables: list[BlockTable],
    groups: Sequence[AttentionGroup],
    state: int,
    block: int,
    traits: Collection[str],
    capability: str,
    caches_prefixes: bool,
) -> list[BlockTable]:
    """The block of attention grows until its page holds a state (of `state` bytes), and the states'
    pages are padded to it."""
    recurrents = [group.recurrent for group in groups if group.recurrent is not None]
    are_all_mamba = all(recurrent.kind not in ("gdn", "kda") for recurrent in recurrents)
    states = 2 if caches_prefixes else 1
    step = block
    if caches_prefixes and are_all_mamba and "states_at_every_block" in traits:
        states = 0
        step = math.lcm(block, recurrents[0].chunk or 2048)
    elif caches_prefixes and "states_within_prefill" in traits:
        if all(
            recurrent.kind == "gdn" and _uses_flashinfer_delta(recurrent, capability)
            for recurrent in recurrents
        ):
            states = 3
            step = math.lcm(block, _DELTA_STEP)
        elif are_all_mamba:
            states = 3
    token = tables[0].page // tables[0].block if tables else 0
    if token:
        block = max(block, step * -(-state // (step * token)))
        tables = [
            table.evolve(page=table.page // table.block * block, block=block) for table in tables
        ]
    page = block * token or state
    return tables + [
        BlockTable("state", group.layers, block, page, states=states) for group in groups
    ]


def _uses_flashinfer_delta(recurrent: Recurrent, capability: str) -> bool:
    """Whether FlashInfer computes the gated delta rule. _resolve_gdn_prefill_backend, with CUDA
    13."""
    return capability == "9.0" or (
        capability.partition(".")[0] in ("10", "12") and recurrent.columns == 128
    )


def _merge_layers(tables: Sequence[BlockTable]) -> tuple[BlockTable, ...]:
    """Layers with equal content are one kind, even if they differ otherwise."""
    if len(tables) < 2:
        return tuple(tables)
    layers_by_table: dict[BlockTable, int] = {}
    for table in tables:
        key_table = table.evolve(layers=0)
        layers_by_table[key_table] = layers_by_table.get(key_table, 0) + table.layers
    return tuple(table.evolve(layers=layers) for table, layers in layers_by_table.items())


def _one_page(tables: Sequence[BlockTable], is_padded: bool) -> list[BlockTable]:
    """All pages as large as the largest: by more tokens in a block, or by padding.
    unify_kv_cache_spec_page_size."""
    largest_page = max(table.page for table in tables)
    result = []
    for table in tables:
        if table.kind == "state":
            result.append(table.evolve(page=largest_page))
        elif largest_page % table.page == 0:
            result.append(
                table.evolve(page=largest_page, block=table.block * (largest_page // table.page))
            )
        else:
            result.append(table.evolve(page=largest_page) if is_padded else table)
    return result


def _group_size(layers: Sequence[int]) -> int:
    """Layers in a group: the fewest of a kind, or the most where that pads less.
    _get_kv_cache_groups_uniform_page_size."""
    fewest = min(layers)
    limit = max(layers)
    return limit if 2 * limit < 3 * fewest else fewest
