"""Nodes that equal each other: by their free GPUs, whichever these are."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

from gateway.domain import Network, Node
from gateway.planner.nodes.kinds import node_kinds
from gateway.profiles.cluster_forms import build_cluster
from gateway.profiles.profiles import Profiles
from tests.support.makers import GIB
from tests.support.node_plans import FAST, decide_on, spans
from tests.support.versions import VLLM_REF

PROFILES = Profiles()


def nodes_of(machine: str, full_gpus: Mapping[int, Collection[int]]) -> tuple[Node, ...]:
    """Two nodes. full_gpus: numbers of GPUs with 1 GiB free, by the number of the node."""
    nodes = build_cluster([PROFILES.hardware(machine)] * 2, Network()).nodes
    return tuple(
        node.evolve(
            hardware=node.hardware.evolve(
                gpus=tuple(
                    gpu.evolve(free_bytes=GIB) if gpu.index in full_gpus[number] else gpu
                    for gpu in node.hardware.gpus
                )
            )
        )
        for number, node in enumerate(nodes)
    )


def test_nodes_with_equal_counts_of_free_gpus_are_alike() -> None:
    nodes = nodes_of("8xh100", {0: {0, 5}, 1: {2, 3}})
    (kind,) = node_kinds(nodes, {}, "m")
    for node, original in zip(kind.nodes, nodes, strict=True):
        assert [gpu.index for gpu in node.hardware.gpus] == [*range(8)]
        assert {gpu.uuid for gpu in node.hardware.gpus} == {
            gpu.uuid for gpu in original.hardware.gpus
        }
        assert [gpu.free_bytes == GIB for gpu in node.hardware.gpus] == [False] * 6 + [True] * 2


@pytest.mark.parametrize(
    ("machine", "full_gpus"),
    [("8xh100", {0: {0, 5}, 1: {2}}), ("3090+4090", {0: {0}, 1: {1}})],
    ids=["more free GPUs", "another GPU"],
)
def test_nodes_with_other_free_gpus_are_unlike(
    machine: str, full_gpus: Mapping[int, Collection[int]]
) -> None:
    assert len(node_kinds(nodes_of(machine, full_gpus), {}, "m")) == 2


def test_gpus_that_are_linked_in_pairs_keep_their_places() -> None:
    nodes = nodes_of("8xh100", {0: {0}, 1: {1}})
    paired_nodes = [
        node.evolve(hardware=node.hardware.evolve(links=node.hardware.links[:4])) for node in nodes
    ]
    assert node_kinds(paired_nodes, {}, "m")[0].nodes == (paired_nodes[0],)


def test_a_rank_has_a_free_gpu_of_its_own_node() -> None:
    nodes = nodes_of("8xh100", {0: {0, 5}, 1: {2, 3}})
    cluster = build_cluster([PROFILES.hardware("8xh100")] * 2, FAST).evolve(nodes=nodes)
    decision = decide_on(cluster, PROFILES.engine(VLLM_REF), "deepseek-v3")
    free_uuids = {
        node.name: {gpu.uuid for gpu in node.hardware.gpus if gpu.free_bytes != GIB}
        for node in nodes
    }
    assert spans(decision)
    for plan in decision.plans:
        for row in plan.nodes:
            assert {*row.gpus} <= free_uuids[row.node]
