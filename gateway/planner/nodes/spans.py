"""Groups of alike nodes that one engine could span, and its layouts on them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from gateway.domain import Cluster, Hardware, ModelSpec, Network, Node
from gateway.domain.record import FrozenRecord
from gateway.engines.common.planning_input import PlanningInput, available_bytes
from gateway.engines.common.span import NodeSpan, SpanLayout
from gateway.engines.common.speed.machine import SpeedTable, node_wire
from gateway.planner.nodes.kinds import NodeKind
from gateway.planner.parallel import sufficient_ranks

# Numbers of nodes of one engine.
_SIZES = (2, 3, 4, 6, 8)
# The fastest different networks that are planned for.
_LEVELS = 3

Quality = tuple[float, float]


class NodeGroups(FrozenRecord, frozen=True):
    """Disjoint groups of nodes, each the place of one copy, and one of them as a machine."""

    groups: tuple[tuple[Node, ...], ...]
    machine: Hardware
    span: NodeSpan
    promised_bytes: dict[str, int]


class Networks:
    """The network between each two nodes of a cluster."""

    def __init__(self, cluster: Cluster, table: SpeedTable | None) -> None:
        self._links = {
            frozenset((link.a, link.b)): Network(
                bytes_s=link.bytes_s, latency_s=link.latency_s, rdma=link.rdma
            )
            for link in cluster.links
        }
        self._network, self._table = cluster.network, table
        self._qualities: dict[tuple[str, str], Quality] = {}
        """Qualities of networks by the names of two nodes."""

    def network(self, a: Node, b: Node) -> Network:
        return self._links.get(frozenset((a.name, b.name)), self._network)

    def quality(self, network: Network) -> Quality:
        """More is better."""
        wire = node_wire(network, self._table) if self._table else None
        return (wire.bytes_s, -wire.latency_s) if wire else (0.0, 0.0)

    def _quality_between(self, a: Node, b: Node) -> Quality:
        if (quality := self._qualities.get((a.name, b.name))) is None:
            quality = self._qualities[a.name, b.name] = self.quality(self.network(a, b))
            self._qualities[b.name, a.name] = quality
        return quality

    def is_unknown(self, groups: NodeGroups) -> bool:
        """Whether no speed follows from the network of these groups."""
        return self.quality(groups.span.network) == (0.0, 0.0)

    def levels(self, nodes: Sequence[Node]) -> list[Network]:
        """The different networks between these nodes, the fastest first."""
        if not self._links:
            return [self._network]
        networks: dict[Quality, Network] = {}
        for a, b in combinations(nodes, 2):
            networks.setdefault(self._quality_between(a, b), self.network(a, b))
        return [networks[quality] for quality in sorted(networks, reverse=True)[:_LEVELS]]

    def groups(
        self, nodes: Sequence[Node], size: int, slowest_network: Network
    ) -> list[tuple[Node, ...]]:
        """Disjoint groups of this many nodes, each two of which have such a network or a better
        one."""
        if not self._links:
            whole_count = len(nodes) // size * size
            return [tuple(nodes[at : at + size]) for at in range(0, whole_count, size)]
        least_quality = self.quality(slowest_network)
        free_nodes, groups = list(nodes), list[tuple[Node, ...]]()
        while group := self._best_node_group(free_nodes, size, least_quality):
            groups.append(group)
            names = {node.name for node in group}
            free_nodes = [node for node in free_nodes if node.name not in names]
        return groups

    def _best_node_group(
        self, nodes: Sequence[Node], size: int, least_quality: Quality
    ) -> tuple[Node, ...] | None:
        for first in nodes:
            group = [first]
            for node in nodes:
                if node is not first and all(
                    self._quality_between(node, member) >= least_quality for member in group
                ):
                    group.append(node)
                if len(group) == size:
                    return tuple(group)
        return None


def node_groups(kind: NodeKind, networks: Networks, inputs: PlanningInput) -> Iterator[NodeGroups]:
    """All spans of the nodes of one kind."""
    machine = _select_free_gpus(kind.hardware.usable(), kind.promised_bytes)
    gpus, limit = len(machine.gpus), inputs.wish.gpus
    if not gpus or len({gpu.name for gpu in machine.gpus}) > 1:
        return
    levels = networks.levels(kind.nodes) if len(kind.nodes) >= _SIZES[0] else []
    for size in _SIZES:
        if size > len(kind.nodes) or (isinstance(limit, int) and size * gpus > limit):
            return
        for network in levels:
            groups = networks.groups(kind.nodes, size, network)
            if groups:
                span = NodeSpan(size, gpus, network, layouts(size, gpus, inputs.spec))
                yield _merge_nodes(tuple(groups), machine, span, kind)


def layouts(nodes: int, gpus: int, spec: ModelSpec) -> tuple[SpanLayout, ...]:
    """The layouts of a model on `gpus` GPUs of each of this many nodes.

    Ranks of a layer fill whole nodes, or a node holds whole groups of them.
    """
    ranks = nodes * gpus
    sizes = [
        size
        for size in range(ranks, 0, -1)
        if ranks % size == 0 and (size % gpus == 0 or gpus % size == 0)
    ]
    result = [SpanLayout(size, ranks // size) for size in sizes]
    if spec.experts is not None:
        max_ranks = sufficient_ranks(spec.attention, gpus)
        result += [SpanLayout(size, 1, ranks // size) for size in sorted({max_ranks, gpus})]
    return tuple(result)


def _select_free_gpus(machine: Hardware, promised_bytes: Mapping[str, int]) -> Hardware:
    """The machine with the GPUs that have at least half of the room of its emptiest GPU."""
    free_bytes = {gpu.uuid: available_bytes(gpu, promised_bytes) for gpu in machine.gpus}
    max_free_bytes = max(free_bytes.values(), default=0)
    return machine.select_gpus(lambda gpu: 2 * free_bytes[gpu.uuid] >= max_free_bytes)


def _merge_nodes(
    groups: tuple[tuple[Node, ...], ...], machine: Hardware, span: NodeSpan, kind: NodeKind
) -> NodeGroups:
    """The nodes of a group as one machine, whose GPUs are numbered node by node."""
    used_indices = [gpu.index for gpu in machine.gpus]
    position_by_index = {index: number for number, index in enumerate(used_indices)}
    gpus, links, promised_bytes = [], [], dict[str, int]()
    for number, node in enumerate(groups[0]):
        gpu_by_index = {node_gpu.index: node_gpu for node_gpu in node.hardware.gpus}
        for gpu in machine.gpus:
            uuid = gpu_by_index[gpu.index].uuid
            index = number * len(used_indices) + position_by_index[gpu.index]
            gpus.append(gpu.evolve(index=index, uuid=uuid))
            promised_bytes[uuid] = kind.promised_bytes.get(gpu.uuid, 0)
        links += [
            link.evolve(
                a=number * len(used_indices) + position_by_index[link.a],
                b=number * len(used_indices) + position_by_index[link.b],
            )
            for link in machine.links
        ]
    whole_hardware = machine.evolve(gpus=tuple(gpus), links=tuple(links))
    return NodeGroups(groups, whole_hardware, span, promised_bytes)
