"""Decisions for many nodes that differ in free memory alone stay as short as for a few."""

from __future__ import annotations

from gateway.domain import Decision
from gateway.planner.nodes.repeats import best_of_layouts, distinct_refusals
from gateway.profiles.cluster_forms import build_cluster
from gateway.profiles.profiles import Profiles
from tests.support.node_plans import FAST, decide_on
from tests.support.versions import VLLM_REF

PROFILES = Profiles()


def decide_for(nodes: int) -> Decision:
    """The decision for nodes with one GPU, each with another amount of free memory."""
    cluster = build_cluster([PROFILES.hardware("3090")] * nodes, FAST)
    uneven_nodes = []
    for number, node in enumerate(cluster.nodes):
        (gpu,) = node.hardware.gpus
        assert gpu.total_bytes is not None
        free_bytes = gpu.total_bytes * (nodes - number) // nodes
        hardware = node.hardware.evolve(gpus=(gpu.evolve(free_bytes=free_bytes),))
        uneven_nodes.append(node.evolve(hardware=hardware))
    return decide_on(
        cluster.evolve(nodes=tuple(uneven_nodes)), PROFILES.engine(VLLM_REF), "llama-3.1-8b"
    )


def test_many_uneven_nodes_add_no_plans_and_refusals_without_end() -> None:
    decision_of_few, decision_of_many = decide_for(16), decide_for(48)
    assert decision_of_many.plans[0].nodes[0].node == "node-1"
    assert decision_of_few.plans[0].nodes[0].node == "node-1"
    assert len(decision_of_many.plans) <= 2 * len(decision_of_few.plans)
    assert len(decision_of_many.rejected) <= 2 * len(decision_of_few.rejected)
    layouts = [
        {(plan.tensor_parallel.value, plan.span) for plan in decision.plans}
        for decision in (decision_of_few, decision_of_many)
    ]
    assert layouts[0] == layouts[1]


def test_the_refusal_with_the_most_memory_stands_for_its_like() -> None:
    decision = decide_for(48)
    rows = [row for row in decision.rejected if row.memory is not None]
    assert rows
    for row in rows:
        assert row.memory is not None
        small_memory = row.memory.evolve(budget_bytes=row.memory.budget_bytes - 1)
        small_row = row.evolve(memory=small_memory, reasons=("it has less memory",))
        assert [*distinct_refusals([small_row, row])] == [row]
        assert [*distinct_refusals([row, small_row])] == [row]
        other_row = small_row.evolve(verdict="another")
        assert [*distinct_refusals([row, other_row])] == [row, other_row]


def test_the_best_plans_of_a_layout_stay() -> None:
    (plan, *_) = decide_for(16).plans
    copies = [plan.evolve(rank=number) for number in range(20)]
    assert [plan.rank for plan in best_of_layouts(copies)] == [*range(8)]
