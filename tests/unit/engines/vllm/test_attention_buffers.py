"""Buffers of attention backends: FlashInfer's workspaces, and none of FlashAttention."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import AttentionGroup, LayerAttention
from gateway.domain.units import MIB
from gateway.engines.vllm.attention_buffers import AttentionBuffers, attention_buffers
from gateway.engines.vllm.engine import VllmRules
from gateway.models.rank import Rank
from gateway.models.workload import Workload
from gateway.profiles.profiles import Profiles

PROFILES = Profiles()
WORKSPACE, PLAN = 394 * MIB, 8 * MIB
GROUPS = (AttentionGroup(kind="full", layers=16, heads=24, kv_heads=4, head_dim=256),)


def buffers(
    version: str,
    backend: str = "FLASHINFER",
    capability: str = "12.0",
    *,
    in_budget: bool = True,
    **load: Any,
) -> AttentionBuffers:
    rules = PROFILES.rules([PROFILES.engine(f"vllm=={version}")])[f"vllm=={version}"]
    assert isinstance(rules, VllmRules)
    values = {"batched_tokens": 3135, "seqs": 32, "graphs": True, **load}
    row = LayerAttention(kind="full", layers=16, head_dim=256, backend=backend, status="ok")
    workload = Workload("cuda", Rank(tp=2, capability=capability), **values)
    return attention_buffers(rules.attention, GROUPS, [row], workload, graphs_in_budget=in_budget)


def test_a_plan_of_decoding_for_each_batch_size_counts_beside_the_workspace() -> None:
    """1, 2, 4, 8, 16, 24 and 32 requests."""
    assert buffers("0.26.0").counted_bytes == WORKSPACE + 7 * PLAN
    assert buffers("0.26.0").outside_bytes == 0


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
def test_other_backends_keep_no_buffers(backend: str) -> None:
    assert buffers("0.26.0", backend) == AttentionBuffers()


def test_a_large_batch_of_wide_heads_needs_a_larger_workspace() -> None:
    counted_bytes = buffers("0.26.0", batched_tokens=16384).counted_bytes
    assert counted_bytes == 16384 * 12 * 256 * 16 + 7 * PLAN


@pytest.mark.parametrize(
    "load", [{"graphs": False}, {"query": 4}], ids=["without graphs", "with drafts"]
)
def test_the_workspace_comes_after_the_cache_without_whole_graphs(load: dict[str, Any]) -> None:
    assert buffers("0.26.0", **load) == AttentionBuffers(0, WORKSPACE)


def test_an_estimate_that_leaves_graphs_out_leaves_all_buffers_out() -> None:
    assert buffers("0.26.0", in_budget=False) == AttentionBuffers(0, WORKSPACE + 7 * PLAN)


def test_the_second_runner_makes_the_workspace_before_its_estimate() -> None:
    assert buffers("0.26.0", runner=2) == AttentionBuffers(7 * PLAN, WORKSPACE)


@pytest.mark.parametrize(("version", "capability"), [("0.26.0", "10.0"), ("0.33.0", "10.3")])
def test_data_center_blackwell_decodes_without_plans(version: str, capability: str) -> None:
    found_buffers = buffers(version, capability=capability, query=4)
    assert found_buffers == AttentionBuffers(WORKSPACE, 0)


def test_version_0_33_decodes_on_workstations_without_plans() -> None:
    assert buffers("0.33.0").counted_bytes == 2 * WORKSPACE
    assert buffers("0.33.0", capability="8.6").counted_bytes == WORKSPACE + 7 * PLAN


def test_versions_whose_public_figure_has_no_room_for_a_workspace_count_none() -> None:
    assert buffers("0.19.1") == AttentionBuffers()
