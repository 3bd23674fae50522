"""Buffers of vLLM's attention backends, besides the KV cache: workspaces, and plans of CUDA graphs.
Pure.

VllmBackend.workspaces (attention.yaml) + AttentionGroups + Workload -> AttentionBuffers
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gateway.domain import AttentionGroup, LayerAttention
from gateway.engines.common.rules.subject import AttentionQuery, LayerKind, Subject
from gateway.engines.vllm.attention_rules import AttentionRules, Workspace
from gateway.engines.vllm.memory import whole_graph_sizes
from gateway.models.workload import Workload

_KINDS: dict[str, LayerKind] = {"full": "full", "sliding": "sliding", "mla": "mla"}


class AttentionBuffers(NamedTuple):
    """Bytes of one rank, by the engine's estimate of its CUDA graphs.

    counted_bytes: bytes that the estimate includes.
    outside_bytes: bytes that are taken later, out of the memory next to the budget.
    """

    counted_bytes: int = 0
    outside_bytes: int = 0


def attention_buffers(
    rules: AttentionRules | None,
    groups: Iterable[AttentionGroup],
    rows: Iterable[LayerAttention],
    load: Workload,
    *,
    graphs_in_budget: bool,
) -> AttentionBuffers:
    """The buffers of all backends."""
    if rules is None or load.device != "cuda":
        return AttentionBuffers()
    heads: dict[tuple[str, int], int] = {
        (group.kind, group.head_dim): group.heads for group in groups
    }
    counted_bytes = outside_bytes = 0
    for row in rows:
        workspace = _workspace_of(rules, row, load)
        if workspace is None:
            continue
        rank_heads = max(1, heads.get((row.kind, row.head_dim), 1) // max(1, load.rank.tp))
        values = load.batched_tokens * rank_heads * row.head_dim
        early_bytes, graph_bytes = _split_workspace(workspace, values, load)
        counted_bytes += graph_bytes if graphs_in_budget else 0
        outside_bytes += early_bytes + (0 if graphs_in_budget else graph_bytes)
    return AttentionBuffers(counted_bytes, outside_bytes)


def _split_workspace(workspace: Workspace, values: int, load: Workload) -> tuple[int, int]:
    """Bytes that an estimate of CUDA graphs leaves out, and bytes that it includes.

    The first model runner makes all buffers as it captures its first whole graph
    (profile_cudagraph_memory in vllm/v1/worker/gpu_model_runner.py of 0.26.0). The second one makes
    the shared buffer with its builders, before the estimate (vllm/v1/worker/gpu/attn_utils.py of
    0.33.0).

    values: number of values in the queries of a full batch.
    """
    shared_bytes = max(workspace.shared_bytes, workspace.query_bytes * values)
    has_whole_graphs = load.graphs and (load.query == 1 or workspace.has_draft_graphs)
    if not has_whole_graphs:
        return shared_bytes + workspace.decode_bytes, 0
    graph_bytes = workspace.decode_bytes + workspace.graph_bytes * whole_graph_sizes(load)
    return (0, shared_bytes + graph_bytes) if load.runner == 1 else (shared_bytes, graph_bytes)


def _workspace_of(rules: AttentionRules, row: LayerAttention, load: Workload) -> Workspace | None:
    """The workspace of this layer's backend; None: it keeps none."""
    backend = rules.backends.get(row.backend or "")
    kind = _KINDS.get(row.kind)
    if backend is None or kind is None:
        return None
    subject = Subject(
        load.rank.capability,
        frozenset(rules.packages),
        attention=AttentionQuery(kind, row.head_dim, kv_dtype=load.rank.kv_dtype),
    )
    return next(
        (workspace for workspace in backend.workspaces if workspace.match.refusal(subject) is None),
        None,
    )
