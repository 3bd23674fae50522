"""Groups of alike nodes that one engine could span, and its layouts on them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from gateway.domain import Cluster, Hardware, ModelSpec, Network, Node, NodeLink
from gateway.domain.record import FrozenRecord
from gateway.engines.common.planning_input import PlanningInput, available_bytes
from gateway.engines.common.span import NodeSpan, SpanLayout
from gateway.engines.common.speed.machine import SpeedTable, node_wire
from gateway.planner.nodes.groupings import Quality, best_groupings, fast_groupings
from gateway.planner.nodes.kinds import NodeKind
from gateway.planner.nodes.measured_networks import MeasuredNetworks
from gateway.planner.parallel import sufficient_ranks

# Numbers of nodes of one engine.
_SIZES = (2, 3, 4, 6, 8)
# More nodes have too many groups to compare all.
_MAX_EXACT_NODES = 8
UNKNOWN: Quality = (0.0, 0.0)


class NodeGroups(FrozenRecord, frozen=True):
    """Disjoint groups of nodes, each the place of one copy, and one of them as a machine."""

    groups: tuple[tuple[Node, ...], ...]
    machine: Hardware
    span: NodeSpan
    promised_bytes: dict[str, int]


class Networks:
    """The network between each two nodes of a cluster: stated, measured, or that of all nodes."""

    def __init__(
        self, cluster: Cluster, table: SpeedTable | None, measured_networks: MeasuredNetworks
    ) -> None:
        self._stated_networks = {
            frozenset((link.a, link.b)): network_of_link(link) for link in cluster.links
        }
        self._measured_networks = measured_networks
        self._network = cluster.network
        self._table = table
        self._networks: dict[tuple[str, str], Network] = {}
        self._qualities: dict[tuple[str, str], Quality] = {}
        """Qualities of networks by the names of two nodes."""

    def _network_between(self, a: Node, b: Node) -> Network:
        key = a.name, b.name
        if (network := self._networks.get(key)) is None:
            network = self._stated_networks.get(frozenset(key))
            if network is None:
                link = self._measured_networks.link(a, b) if self._measured_networks else None
                network = self._network if link is None else network_of_link(link)
            self._networks[key] = self._networks[b.name, a.name] = network
        return network

    def quality(self, network: Network) -> Quality:
        """More is better; zeros: no speed follows from the network."""
        wire = node_wire(network, self._table) if self._table else None
        return (wire.bytes_s, -wire.latency_s) if wire else UNKNOWN

    def _quality_between(self, a: Node, b: Node) -> Quality:
        if (quality := self._qualities.get((a.name, b.name))) is None:
            quality = self._qualities[a.name, b.name] = self.quality(self._network_between(a, b))
            self._qualities[b.name, a.name] = quality
        return quality

    def is_unknown(self, groups: NodeGroups) -> bool:
        """Whether no speed follows from the network of these groups."""
        return self.quality(groups.span.network) == UNKNOWN

    def groupings(self, nodes: Sequence[Node], size: int) -> Iterator[list[tuple[Node, ...]]]:
        """Disjoint groups of this many nodes, for the fastest networks between them."""
        if not self._stated_networks and not self._measured_networks:
            whole_count = len(nodes) // size * size
            yield [tuple(nodes[at : at + size]) for at in range(0, whole_count, size)]
            return

        def quality(a: int, b: int) -> Quality:
            return self._quality_between(nodes[a], nodes[b])

        search = best_groupings if len(nodes) <= _MAX_EXACT_NODES else fast_groupings
        for groups in search(len(nodes), size, quality):
            yield [tuple(nodes[position] for position in group) for group in groups]

    def slowest(self, groups: Sequence[Sequence[Node]]) -> Network:
        """The slowest network within groups, with the longest latency of any."""
        networks = [
            self._network_between(a, b) for group in groups for a, b in combinations(group, 2)
        ]
        slowest_network = min(networks, key=self.quality)
        if self.quality(slowest_network) == UNKNOWN:
            return slowest_network
        latencies = [network.latency_s for network in networks if network.latency_s is not None]
        return slowest_network.evolve(latency_s=max(latencies, default=None))


def network_of_link(link: NodeLink) -> Network:
    """The network of a link, without its ends."""
    return Network(
        bytes_s=link.bytes_s,
        latency_s=link.latency_s,
        rdma=link.rdma,
        tcp_bytes_s=link.tcp_bytes_s,
    )


def node_groups(kind: NodeKind, networks: Networks, inputs: PlanningInput) -> Iterator[NodeGroups]:
    """All spans of the nodes of one kind."""
    machine = _select_free_gpus(kind.hardware.usable(), kind.promised_bytes)
    gpus = len(machine.gpus)
    limit = inputs.wish.gpus
    if not gpus or len({gpu.name for gpu in machine.gpus}) > 1:
        return
    for size in _SIZES:
        if size > len(kind.nodes) or (isinstance(limit, int) and size * gpus > limit):
            return
        for groups in networks.groupings(kind.nodes, size):
            network = networks.slowest(groups)
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
    gpus = []
    links = []
    promised_bytes = dict[str, int]()
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
