"""Bytes: weights per rank, KV cache per token, and what an engine needs beside them.

Weights and KV follow from shapes and are exact for what they cover; activations, graphs and overhead are
estimates, which is why a Memory has a band (`low`, `high`) around everything but the KV cache.
"""

from __future__ import annotations

import math

from gateway.domain import AttentionGroup, Memory, ModelSpec, TensorGroup

GIB = 1024**3
MIB = 1024**2
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_FLOATS = {"BF16", "F16", "F32", "F64"}
_STORED_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2}

# CUDA context, cuBLAS workspace and allocator slack: 0.22 GiB of non-torch memory was logged on an H200 by
# vLLM 0.26.0 for one rank; NCCL buffers come on top for each rank of a group.
_OVERHEAD = 0.25 * GIB
_NCCL = 0.35 * GIB
# Graph capture of a small model took 0.21 GiB there; larger batches and more layers take more, hence the band.
_GRAPHS = 0.25 * GIB


def rank_bytes(tensor: TensorGroup, spec: ModelSpec, tp: int, dtype: str) -> int:
    """Bytes that one rank holds of these tensors, after the engine's cast to `dtype` and its split over `tp` ranks."""
    item = _STORED_BYTES.get(tensor.dtype, 1)
    if tensor.dtype in _FLOATS or (spec.quant is None and tensor.dtype.startswith("F8_")):
        item = ITEM_BYTES[dtype]
    elements = math.prod(tensor.shape)
    matrix = len(tensor.shape) >= 2
    if tensor.shard == "vocab" and tensor.shape:
        elements = padded_vocab(tensor.shape[0]) // tp * math.prod(tensor.shape[1:])
    elif tensor.shard in ("column", "expert_column") or (tensor.shard in ("row", "expert_row") and matrix):
        elements //= tp
    elif tensor.shard == "kv":
        # Fewer KV heads than ranks: each rank holds one head, repeated.
        elements //= min(tp, spec.attention[0].kv_heads)
    return elements * item * tensor.count


def padded_vocab(rows: int) -> int:
    """Rows of an embedding with the engine's padding. Source: vllm/model_executor/layers/vocab_parallel_embedding.py."""
    return -(-rows // 64) * 64


def weights_bytes(spec: ModelSpec, tp: int, dtype: str) -> int:
    """Bytes of weights on one rank."""
    return sum(rank_bytes(tensor, spec, tp, dtype) for tensor in spec.tensors)


def kv_bytes_per_token(spec: ModelSpec, tp: int, dtype: str) -> int:
    """Bytes that one more token of context costs on one rank, in every layer that keeps it."""
    layers = _cached_layers(spec)
    growing = [(group, count) for group, count in layers if group.kind == "full"] or layers
    return sum(_token_bytes(group, tp, dtype) * count for group, count in growing)


def kv_bytes_for(spec: ModelSpec, tp: int, dtype: str, length: int, batched_tokens: int, block: int) -> int:
    """Bytes of KV cache on one rank for one request of `length` tokens, in whole blocks.

    A sliding window layer keeps its window and what is in flight: min(window - 1 + 2 x batched, length) tokens,
    plus a block. Twice the batch because of asynchronous scheduling; versions before 0.26.0 count it once, so this is
    not too little for them. Source: SlidingWindowSpec in vllm/v1/kv_cache_interface.py.
    """
    total = 0
    for group, layers in _cached_layers(spec):
        blocks = -(-length // block)
        if group.kind == "sliding":
            kept = min((group.window or length) - 1 + 2 * batched_tokens, length)
            blocks = -(-kept // block) + 1
        total += blocks * block * _token_bytes(group, tp, dtype) * layers
    return total


def _token_bytes(group: AttentionGroup, tp: int, dtype: str) -> int:
    """Keys and values of one token in one layer on one rank; with fewer KV heads than ranks, each holds one."""
    return 2 * max(1, group.kv_heads // tp) * group.head_dim * ITEM_BYTES[dtype]


def _cached_layers(spec: ModelSpec) -> list[tuple[AttentionGroup, int]]:
    """The attention that keeps a cache, and for how many layers the engine allocates it.

    Where full and sliding layers mix, the engine deals them into groups of one size, so a kind may be padded.
    Source: _get_kv_cache_groups_uniform_page_size in vllm/v1/core (kv_cache_utils.py, since 0.33.0 kv_cache_planning.py).
    """
    cached = [(group, group.layers) for group in spec.attention if group.kind != "encoder"]
    if len(cached) < 2:
        return cached
    fewest, most = min(layers for _, layers in cached), max(layers for _, layers in cached)
    size = most if 2 * most < 3 * fewest else fewest
    return [(group, -(-layers // size) * size) for group, layers in cached]


def largest_context(spec: ModelSpec, tp: int, dtype: str, kv_bytes: int, batched_tokens: int, block: int, limit: int) -> int:
    """The longest request (at most `limit` tokens) whose KV cache fits into `kv_bytes`; 0 when not even one token does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if kv_bytes_for(spec, tp, dtype, middle, batched_tokens, block) <= kv_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def position_bytes(spec: ModelSpec, dtype: str) -> int:
    """Bytes of the table of sines and cosines for rotary positions, which every rank holds once for all layers.

    Source: RotaryEmbedding (vllm/model_executor/layers/rotary_embedding); models without it keep no less in weights.
    """
    return spec.max_position * max(group.head_dim for group in spec.attention) * ITEM_BYTES[dtype]


def activation_bytes(spec: ModelSpec, tp: int, dtype: str, batched_tokens: int, seqs: int) -> int:
    """Peak of one forward pass at a full batch: hidden states, the widest MLP, and the logits in float32.

    An estimate: the shape of the computation gives the terms, the engine's allocator decides the rest.
    """
    widest = max(
        (t.shape[0] for t in spec.tensors if t.shard in ("column", "expert_column") and len(t.shape) == 2), default=spec.hidden
    )
    per_token = 4 * spec.hidden + 3 * widest // tp
    if spec.experts:
        per_token += spec.experts.per_token * (spec.hidden + 2 * spec.experts.intermediate // tp)
    logits = min(seqs, batched_tokens) * spec.vocab * 4 * 2
    return per_token * ITEM_BYTES[dtype] * batched_tokens + logits


def memory(
    spec: ModelSpec,
    *,
    device: str,
    device_bytes: int,
    budget_bytes: int,
    tp: int,
    dtype: str,
    batched_tokens: int,
    seqs: int,
    graphs: bool,
) -> Memory:
    """The Memory of one rank under a budget; `kv_bytes` is what the expected case leaves, 0 when it leaves nothing."""
    weights = weights_bytes(spec, tp, dtype)
    activation = activation_bytes(spec, tp, dtype, batched_tokens, seqs)
    overhead = round(_OVERHEAD + (_NCCL if tp > 1 else 0)) if device == "cuda" else 2 * GIB
    overhead += position_bytes(spec, dtype)
    graph = round(_GRAPHS) if graphs else 0
    used = weights + activation + overhead + graph
    per_token = kv_bytes_per_token(spec, tp, dtype)
    kv = max(0, budget_bytes - used) if per_token else 0
    return Memory(
        gpu_bytes=device_bytes,
        budget_bytes=budget_bytes,
        weights_bytes=weights,
        activation_bytes=activation,
        graph_bytes=graph,
        overhead_bytes=overhead,
        kv_bytes=kv,
        kv_bytes_per_token=per_token,
        kv_tokens=kv // per_token if per_token else 0,
        low=weights + activation // 2 + overhead // 2,
        high=weights + weights // 50 + 2 * activation + overhead + GIB // 2 + 4 * graph,
    )
