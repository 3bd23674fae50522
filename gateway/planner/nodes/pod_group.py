"""A plan over nodes for pods, whose addresses and places are known only at their start. Pure."""

from __future__ import annotations

from gateway.domain import Plan, Scalar
from gateway.engines.common.span import Rendezvous
from gateway.engines.registry import engine_kind
from gateway.planner.flags import arguments
from gateway.planner.nodes.placement import GROUPS, RENDEZVOUS


def pod_plan(plan: Plan, leader: str, pod_index: str) -> Plan:
    """The first copy of a plan over nodes, whose later nodes have equal flags.

    leader: the address of the first pod, for the others.
    pod_index: the position of a pod in its group.

    Both are variables, `$(NAME)`. The first pod names itself by the variable of its own address,
    since sockets listen at no name.
    """
    kind = engine_kind(plan.engine.kind)
    first = plan.nodes[0]
    pod_address = f"$({kind.address_env})"

    def flags(address: str, node_rank: int) -> dict[str, Scalar]:
        groups = plan.data_parallel.value
        ports = first.ports
        meeting = Rendezvous(plan.span, groups, address, ports[RENDEZVOUS], ports[GROUPS])
        return kind.node_flags(meeting, node_rank)

    second = flags(leader, 1)
    third = flags(leader, 2)
    later_values = {
        name: value if value == third[name] else _times(pod_index, value)
        for name, value in second.items()
    }
    first_copy_nodes = (node_ranks for node_ranks in plan.nodes if node_ranks.copy_number == 0)
    return plan.evolve(
        nodes=tuple(
            node_ranks.evolve(
                argv=arguments(later_values if node_ranks.node_rank else flags(pod_address, 0)),
                env={},
            )
            for node_ranks in first_copy_nodes
        )
    )


def _times(pod_index: str, factor: Scalar) -> str:
    """The product, by a shell where it is not the index itself."""
    return pod_index if factor == 1 else f"$(({pod_index[2:-1]}*{factor}))"
