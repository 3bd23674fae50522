"""Which tensor parallel sizes a model allows, and which GPUs form a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations

from gateway.domain import Gpu, Hardware, ModelSpec

SIZES = (1, 2, 3, 4, 5, 6, 7, 8)
# Source: VocabParallelEmbedding pads to this before it divides (vllm/model_executor/layers/vocab_parallel_embedding.py).
_VOCAB_PADDING = 64


def illegal(spec: ModelSpec, tp: int) -> str | None:
    """Why `tp` ranks cannot share this model, or None when they can.

    Source: `verify_with_parallel_config` (vllm/config/model.py) for heads; `divide` asserts in
    vllm/model_executor/layers/linear.py and vocab_parallel_embedding.py for the rest.
    """
    if tp == 1:
        return None
    for group in spec.attention:
        if group.heads % tp:
            return f"{group.heads} attention heads cannot be shared by {tp} GPUs"
        if group.kv_heads % tp and tp % group.kv_heads:
            return f"{group.kv_heads} KV heads can be neither split over nor repeated on {tp} GPUs"
    vocab = -(-spec.vocab // _VOCAB_PADDING) * _VOCAB_PADDING
    if vocab % tp:
        return f"the vocabulary ({vocab} rows with padding) cannot be split over {tp} GPUs"
    for tensor in spec.tensors:
        if len(tensor.shape) != 2:
            continue
        if tensor.shard in ("column", "expert_column") and tensor.shape[0] % tp:
            return f"{tensor.name} has {tensor.shape[0]} rows, which {tp} GPUs cannot split"
        if tensor.shard in ("row", "expert_row") and tensor.shape[1] % tp:
            return f"{tensor.name} has {tensor.shape[1]} columns, which {tp} GPUs cannot split"
    return None


def available_bytes(gpu: Gpu, claims: Mapping[str, int]) -> int:
    """Bytes that a new engine may count on: what is free now, less what our engines were promised and may not use yet."""
    total = gpu.total_bytes or 0
    free = total if gpu.free_bytes is None else gpu.free_bytes
    return max(0, min(free, total - claims.get(gpu.uuid, 0)))


def best_group(hardware: Hardware, tp: int, claims: Mapping[str, int]) -> tuple[Gpu, ...] | None:
    """The `tp` alike GPUs to use: most NVLink between them, then most free memory, then lowest index."""
    links = {frozenset((link.a, link.b)): link.nvlinks or 0 for link in hardware.links}
    kinds: dict[tuple[str, str | None, int | None], list[Gpu]] = {}
    for gpu in hardware.gpus:
        kinds.setdefault((gpu.name, gpu.capability, gpu.total_bytes), []).append(gpu)
    groups = [group for alike in kinds.values() for group in combinations(alike, tp)]

    def preference(group: tuple[Gpu, ...]) -> tuple[int, int, list[int]]:
        nvlinks = sum(links.get(frozenset((a.index, b.index)), 0) for a, b in combinations(group, 2))
        return nvlinks, min(available_bytes(gpu, claims) for gpu in group), [-gpu.index for gpu in group]

    return max(groups, key=preference, default=None)


def peers_without_p2p(hardware: Hardware, group: Iterable[Gpu]) -> tuple[int, int] | None:
    """The first pair of the group for which neither NVLink nor working peer-to-peer access was read."""
    links = {frozenset((link.a, link.b)): link for link in hardware.links}
    for a, b in combinations(group, 2):
        link = links.get(frozenset((a.index, b.index)))
        if link is None or not (link.nvlinks or link.p2p):
            return a.index, b.index
    return None
