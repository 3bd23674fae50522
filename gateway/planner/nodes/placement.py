"""The nodes, GPUs and ports of every rank of a plan. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from gateway.domain import Hardware, Node, NodeRanks, Plan
from gateway.engines.common.planning_input import available_bytes
from gateway.engines.common.span import Rendezvous
from gateway.engines.registry import engine_kind
from gateway.planner.flags import arguments
from gateway.planner.nodes.kinds import NodeKind
from gateway.planner.nodes.spans import NodeGroups
from gateway.planner.parallel import GpuGroups

# The ports at which nodes meet: the engine's own group of processes, and the groups of ranks with
# requests of their own. Some kinds take the ports after the first too (`node_flags`).
_FIRST_PORT = 29600
_LAST_PORT = 32700
_PORTS_PER_ENGINE = 64
RENDEZVOUS = "rendezvous"
GROUPS = "groups"


def place_on_nodes(plan: Plan, kind: NodeKind) -> Plan:
    """The plan with its copies on the nodes of this kind, node by node."""
    if not plan.gpus:
        return plan.evolve(nodes=(NodeRanks(node=kind.nodes[0].name, ranks=(0,), gpus=()),))
    copies = list(_gpus_of_copies(plan, kind.hardware, kind.promised_bytes))
    nodes: list[NodeRanks] = []
    for node in kind.nodes:
        uuid_by_index = {gpu.index: gpu.uuid for gpu in node.hardware.gpus}
        for gpu_indices in copies:
            if len(nodes) < plan.replicas.value:
                node_ranks = NodeRanks(
                    node=node.name,
                    copy_number=len(nodes),
                    ranks=tuple(range(len(gpu_indices))),
                    gpus=tuple(uuid_by_index[index] for index in gpu_indices),
                )
                nodes.append(node_ranks)
    return plan.evolve(nodes=tuple(nodes))


def _gpus_of_copies(
    plan: Plan, machine: Hardware, promised_bytes: Mapping[str, int]
) -> Iterator[tuple[int, ...]]:
    """The GPUs of each copy on one node, by their indices; those of the plan come first."""
    index_by_uuid = {gpu.uuid: gpu.index for gpu in machine.gpus}
    gpu_indices = tuple(index_by_uuid[uuid] for uuid in plan.gpus)
    yield gpu_indices
    free_hardware = machine.usable().select_gpus(
        lambda gpu: available_bytes(gpu, promised_bytes) >= plan.memory.budget_bytes
    )
    while plan.replicas.value > 1:
        free_hardware = _remove_gpus(free_hardware, gpu_indices)
        group = GpuGroups(free_hardware, promised_bytes).best_group(len(gpu_indices))
        if group is None:
            return
        gpu_indices = tuple(gpu.index for gpu in group)
        yield gpu_indices


def _remove_gpus(machine: Hardware, indices: Collection[int]) -> Hardware:
    return machine.select_gpus(lambda gpu: gpu.index not in indices)


def place_on_groups(
    plan: Plan, node_groups: NodeGroups, ports_in_use: Mapping[str, Collection[int]]
) -> Plan:
    """The plan with each copy on a group of nodes. ports_in_use: by node."""
    size = node_groups.span.gpus_each
    machine = node_groups.machine
    used_uuids = [gpu.uuid for gpu in machine.gpus[:size]]
    first = {gpu.uuid: gpu.index for gpu in node_groups.groups[0][0].hardware.gpus}
    indices = [first[uuid] for uuid in used_uuids]
    kind = engine_kind(plan.engine.kind)
    nodes = []
    for number, group in enumerate(node_groups.groups[: plan.replicas.value]):
        ports = _ports(ports_in_use.get(group[0].name, ()))
        meeting = Rendezvous(
            len(group),
            plan.data_parallel.value,
            group[0].address or group[0].name,
            ports[RENDEZVOUS],
            ports[GROUPS],
        )
        for node_rank, node in enumerate(group):
            uuid_by_index = {gpu.index: gpu.uuid for gpu in node.hardware.gpus}
            node_ranks = NodeRanks(
                node=node.name,
                copy_number=number,
                node_rank=node_rank,
                ranks=tuple(range(node_rank * size, (node_rank + 1) * size)),
                gpus=tuple(uuid_by_index[index] for index in indices),
                ports={} if node_rank else ports,
                argv=arguments(kind.node_flags(meeting, node_rank)),
                env=_variables(node, kind.address_env),
            )
            nodes.append(node_ranks)
    return plan.evolve(nodes=tuple(nodes))


def _ports(ports_in_use: Collection[int]) -> dict[str, int]:
    """The first free stretch of ports."""
    starts = range(_FIRST_PORT, _LAST_PORT, _PORTS_PER_ENGINE)
    free_ports = (
        start
        for start in starts
        if not any(start <= port < start + _PORTS_PER_ENGINE for port in ports_in_use)
    )
    start = next(free_ports, _FIRST_PORT)
    return {RENDEZVOUS: start, GROUPS: start + _PORTS_PER_ENGINE // 2}


def _variables(node: Node, address_env: str) -> dict[str, str]:
    """The variables that keep an engine on the network between nodes, where that is known."""
    address = {address_env: node.address} if node.address else {}
    if node.interface is None:
        return address
    # `=`: NCCL takes the name for the beginning of names without it (NCCL_SOCKET_IFNAME).
    return {
        **address,
        "NCCL_SOCKET_IFNAME": f"={node.interface}",
        "GLOO_SOCKET_IFNAME": node.interface,
    }
