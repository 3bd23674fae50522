"""Memory of vLLM's profile run for attention of an index. Pure.

DeepSeek V3.2, GLM-5 and DeepSeek V4 choose the tokens of a query by it.

Sources of vLLM 0.26.0: sparse_attn_indexer of vllm/model_executor/layers/sparse_attn_indexer.py,
forward_mqa of vllm/models/deepseek_v4/nvidia/flashmla.py and forward of
vllm/models/deepseek_v4/attention.py. The same allocations stand in 0.19.1 and 0.33.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gateway.domain import ModelSpec
from gateway.domain.units import MIB
from gateway.engines.common.memory.kv_cache import ITEM_BYTES
from gateway.models.workload import Workload

# The index has logits of this size at most: VLLM_SPARSE_INDEXER_MAX_LOGITS_MB.
_LOGITS_BYTES = 512 * MIB
# Keys of the index are gathered for this many whole contexts (get_max_prefill_buffer_size in
# vllm/v1/attention/backends/mla/indexer.py), with a float32 scale for each key.
_INDEX_CONTEXTS = 40
_SCALE_BYTES = 4
# Latents in 16 bits are gathered for this many contexts: get_prefill_workspace_size in
# vllm/v1/attention/backends/mla/flashmla_sparse.py.
_LATENT_CONTEXTS = 5
# Requests whose compressed keys are gathered together: PREFILL_CHUNK_SIZE of DeepSeek V4.
_COMPRESSED_REQUESTS = 4
# Its attention pads the heads of a rank to these numbers (get_padded_num_q_heads).
_PADDED_HEADS = (64, 128)
_DEFAULT_INDEX_SIZE = 128
# Hidden states that a drafter keeps and joins: _DRAFT_BUFFERS and _DRAFT_INPUTS of memory.py.
_DRAFT_COPIES = 5
# Tables of positions of a model that compresses keys.
_TABLES = 2


class SparseBuffers(NamedTuple):
    """Bytes of one rank.

    peak_bytes: bytes in addition to those of a dense model's forward pass.
    workspace_bytes: bytes of a workspace that experts share with attention.
    """

    peak_bytes: int = 0
    workspace_bytes: int = 0


def sparse_buffers(spec: ModelSpec, load: Workload) -> SparseBuffers:
    """The buffers of the index and of gathered keys; none for other models."""
    text = spec.config.get("text_config")
    fields = text if isinstance(text, Mapping) else spec.config
    if not config_size(fields, "index_topk"):
        return SparseBuffers()
    ratios = fields.get("compress_ratios")
    is_compressed = isinstance(ratios, list)
    numbers = ratios if isinstance(ratios, list) else []
    ratio = min((item for item in numbers if type(item) is int and item > 1), default=1)
    index_size = config_size(fields, "index_head_dim") or _DEFAULT_INDEX_SIZE
    index_bytes = _INDEX_CONTEXTS * load.context // ratio * (index_size + _SCALE_BYTES)
    item_bytes = ITEM_BYTES[load.rank.dtype]
    if not is_compressed:
        latent_size = config_size(fields, "kv_lora_rank") + config_size(fields, "qk_rope_head_dim")
        latent_bytes = _LATENT_CONTEXTS * load.context * latent_size * item_bytes
        return SparseBuffers(_LOGITS_BYTES, max(index_bytes, latent_bytes))
    head_size = config_size(fields, "head_dim")
    rows = load.context // ratio + config_size(fields, "sliding_window") + load.batched_tokens
    key_bytes = _COMPRESSED_REQUESTS * rows * head_size * item_bytes
    heads = max(1, config_size(fields, "num_attention_heads") // load.rank.tp)
    padded_heads = next((count for count in _PADDED_HEADS if heads <= count), heads)
    # Queries are padded into a tensor of their own.
    tensors = 2 if padded_heads > heads else 1
    head_bytes = tensors * load.batched_tokens * padded_heads * head_size * item_bytes
    return SparseBuffers(
        _LOGITS_BYTES + head_bytes + _stream_bytes(spec, fields, load),
        max(index_bytes, key_bytes),
    )


def table_factor(spec: ModelSpec) -> int:
    """Tables of positions, as multiples of one in 16 bits. Layers that compress keys have a table
    of their own, and all are float32 (rotary_emb of vllm/models/deepseek_v4/attention.py)."""
    text = spec.config.get("text_config")
    fields = text if isinstance(text, Mapping) else spec.config
    has_own_table = bool(config_size(fields, "compress_rope_theta"))
    return 2 * _TABLES if has_own_table else 1


def _stream_bytes(spec: ModelSpec, fields: Mapping[str, Any], load: Workload) -> int:
    """Bytes of further residual streams: those that a layer reads, those that it writes, and those
    kept for layers that draft (_mtp_hidden_buffer in vllm/models/deepseek_v4/nvidia/model.py), with
    the drafter's own buffers and inputs."""
    streams = config_size(fields, "hc_mult")
    if not streams:
        return 0
    copies = _DRAFT_COPIES if load.has_drafter else 0
    batch_bytes = load.batched_tokens * spec.hidden * ITEM_BYTES[load.rank.dtype]
    return ((2 + copies) * (streams - 1) + streams) * batch_bytes


def config_size(fields: Mapping[str, Any], name: str) -> int:
    """A size in config.json; 0: it has none."""
    value = fields.get(name)
    return value if type(value) is int and 0 < value < 2**24 else 0
