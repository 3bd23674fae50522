"""What fills a GPU: weights per rank, KV cache, and what an engine needs beside them.

Weights and KV cache follow from shapes (core/weights.py, core/kv.py); activations, graphs and overhead are estimates, which
is why a Memory has a band (`low`, `high`) around everything but the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.core.kv import Cache
from gateway.core.layers import Body, per_rank
from gateway.core.pool import Pool
from gateway.domain import Memory, ModelSpec

GIB = 1024**3
MIB = 1024**2
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

# CUDA context, cuBLAS workspace and allocator slack: 0.22 GiB of non-torch memory was logged on an H200 by
# vLLM 0.26.0 for one rank; NCCL buffers come on top for each rank of a group.
_OVERHEAD = 0.25 * GIB
_NCCL = 0.35 * GIB
# Graph capture of a small model took 0.21 GiB there; larger batches and more layers take more, hence the band.
_GRAPHS = 0.25 * GIB
# Of a family that is not known only the files' tensors are: engines may fuse, pad and cast them otherwise.
_UNKNOWN_FAMILY = 0.1


@dataclass(frozen=True)
class Load:
    """What one rank computes at once: of which ranks there are, in which dtype, and the batch."""

    device: str
    tp: int
    pp: int
    dtype: str
    batched_tokens: int
    seqs: int
    graphs: bool


def position_bytes(spec: ModelSpec, body: Body, dtype: str) -> int:
    """Bytes of the table of sines and cosines for rotary positions, which every rank holds once for all layers.

    Source: RotaryEmbedding (vllm/model_executor/layers/rotary_embedding); models without it keep no less in weights.
    """
    heads = [group.head_dim - (group.value_dim or 0) if group.kind == "mla" else group.head_dim for group in body.attention]
    return spec.max_position * max(heads, default=0) * ITEM_BYTES[dtype]


def activation_bytes(spec: ModelSpec, body: Body, load: Load) -> int:
    """Peak of one forward pass at a full batch: hidden states, the widest MLP, and the logits in float32.

    An estimate: the shape of the computation gives the terms, the engine's allocator decides the rest.
    """
    text = [layer for layer in body.linears if not layer.experts and layer.shard in ("column", "merged", "qkv")]
    widest = max(((per_rank(layer, load.tp) or (0, 0))[1] for layer in text), default=0)
    if not body.known:
        columns = [t.shape[0] for t in body.others if t.shard in ("column", "expert_column") and len(t.shape) == 2]
        widest = 2 * max(columns, default=spec.hidden) // load.tp
    per_token = 4 * spec.hidden + widest + widest // 2
    if spec.experts:
        per_token += spec.experts.per_token * (spec.hidden + 2 * spec.experts.intermediate // load.tp)
    logits = min(load.seqs, load.batched_tokens) * spec.vocab * 4 * 2
    return per_token * ITEM_BYTES[load.dtype] * load.batched_tokens + logits


def memory(
    spec: ModelSpec,
    body: Body,
    cache: Cache | Pool,
    load: Load,
    *,
    weights_bytes: int,
    device_bytes: int,
    budget_bytes: int,
    graphs_in_budget: bool = True,
) -> Memory:
    """The Memory of one rank under a budget; `kv_bytes` is what the expected case leaves, 0 when it leaves nothing.

    graphs_in_budget: the engine keeps graphs within its budget. Versions before 0.21 capture them beside it.
    """
    activation = activation_bytes(spec, body, load)
    overhead = round(_OVERHEAD + (_NCCL if load.tp * load.pp > 1 else 0)) if load.device == "cuda" else 2 * GIB
    overhead += position_bytes(spec, body, load.dtype)
    graph = round(_GRAPHS) if load.graphs else 0
    used = weights_bytes + activation + overhead + (graph if graphs_in_budget else 0)
    grows = cache.bytes_for(1, load.batched_tokens) > 0
    kv = max(0, budget_bytes - used) if grows else 0
    unsure = 0 if body.known else round(weights_bytes * _UNKNOWN_FAMILY)
    return Memory(
        gpu_bytes=device_bytes,
        budget_bytes=budget_bytes,
        weights_bytes=weights_bytes,
        activation_bytes=activation,
        graph_bytes=graph,
        overhead_bytes=overhead,
        kv_bytes=kv,
        kv_bytes_per_token=cache.bytes_per_token,
        kv_tokens=kv // cache.bytes_per_token if cache.bytes_per_token else 0,
        low=weights_bytes - unsure + activation // 2 + overhead // 2,
        high=weights_bytes + weights_bytes // 50 + unsure + 2 * activation + overhead + GIB // 2 + 4 * graph,
    )
