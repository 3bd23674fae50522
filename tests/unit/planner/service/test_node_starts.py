"""Plans for several machines in the form in which a gateway starts them."""

from __future__ import annotations

from gateway.domain import Decision, NodeRanks
from gateway.planner.service.node_starts import startable_on_nodes
from tests.support.makers import plan

ONE = plan().evolve(nodes=(NodeRanks(node="one", ranks=(0, 1), gpus=("GPU-0", "GPU-1")),))


def test_only_an_engine_on_a_cpu_is_bound_to_no_machine() -> None:
    on_cpu = ONE.evolve(gpus=(), nodes=(NodeRanks(node="one", ranks=(0,), gpus=()),))
    decision = startable_on_nodes(Decision(model="m", hardware="h", plans=(ONE, on_cpu)))
    assert [plan.nodes for plan in decision.plans] == [ONE.nodes, ()]
