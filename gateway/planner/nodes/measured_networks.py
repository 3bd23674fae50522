"""Networks between nodes that node services measured, as facts. Pure.

networks = MeasuredNetworks(facts)
networks.link(a, b)                  between two nodes; None: it was not measured
networks.links(nodes)                of all pairs that one engine could span
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, groupby

from gateway.domain import Fact, Network, Node, NodeLink
from gateway.domain.hardware import RdmaKind

BANDWIDTH = "bandwidth"
LATENCY = "latency"
# An engine has at most this many nodes, so further pairs decide nothing.
_MAX_GROUP = 8
# Repeated measurements differ by more than the third digit.
_DIGITS = 2
# All values of facts are whole numbers.
_NANO = 1e9


class MeasuredNetworks:
    """The measurements of a cluster. Of repeated ones, the last counts."""

    def __init__(self, facts: Iterable[Fact] = ()) -> None:
        self._facts: dict[tuple[str, str, str], Fact] = {}
        """Facts by names, addresses and quantity."""
        for fact in facts:
            if fact.kind == "network_speed" and fact.value:
                scope = fact.scope
                key = scope.get("nodes", ""), scope.get("addresses", ""), scope.get("what", "")
                self._facts[key] = fact

    def __bool__(self) -> bool:
        """Whether anything was measured."""
        return bool(self._facts)

    def link(self, a: Node, b: Node) -> NodeLink | None:
        """The network between two nodes at their present addresses.

        RDMA counts where the interfaces of both have the same kind. Its rate is that of the ports,
        by their drivers.
        """
        names, addresses = _scope_of(a, b)
        bandwidth = self._facts.get((names, addresses, BANDWIDTH))
        if bandwidth is None or bandwidth.value is None:
            return None
        latency = self._facts.get((names, addresses, LATENCY))
        kind = _common_rdma(a, b)
        return NodeLink(
            a=min(a.name, b.name),
            b=max(a.name, b.name),
            bytes_s=_port_rate(a, b) if kind in ("infiniband", "roce") else None,
            latency_s=latency.value / _NANO if latency is not None and latency.value else None,
            rdma=kind,
            tcp_bytes_s=float(bandwidth.value),
            measured_at=bandwidth.at,
        )

    def links(self, nodes: Sequence[Node]) -> list[NodeLink]:
        """The networks between nodes that one engine could span. Those without a measurement have
        no figures."""
        return [
            self.link(a, b) or NodeLink(a=a.name, b=b.name, rdma=_common_rdma(a, b))
            for a, b in _pairs(nodes)
        ]


def network_facts(a: Node, b: Node, network: Network, now_s: float) -> tuple[Fact, ...]:
    """The facts of a measurement between two nodes. network: its bytes over TCP, and its latency.
    now_s: the time in Unix seconds."""
    names, addresses = _scope_of(a, b)
    values = {
        BANDWIDTH: network.tcp_bytes_s,
        LATENCY: network.latency_s * _NANO if network.latency_s is not None else None,
    }
    return tuple(
        Fact(
            kind="network_speed",
            scope={"nodes": names, "addresses": addresses, "what": quantity},
            value=max(1, _round_digits(value)),
            grade="verified",
            source=f"{a.name} and {b.name} measured it over TCP",
            at=now_s,
        )
        for quantity, value in values.items()
        if value is not None
    )


def _pairs(nodes: Sequence[Node]) -> Iterator[tuple[Node, Node]]:
    """The pairs of nodes that one engine could span.

    Nodes of one kind are taken in groups by name, so the pairs grow with the number of nodes.
    """
    ordered_nodes = sorted(nodes, key=lambda node: (_gpu_names(node), node.name))
    for gpu_names, alike_nodes in groupby(ordered_nodes, key=_gpu_names):
        reachable_nodes = [node for node in alike_nodes if gpu_names and node.address]
        for at in range(0, len(reachable_nodes), _MAX_GROUP):
            yield from combinations(reachable_nodes[at : at + _MAX_GROUP], 2)


def _gpu_names(node: Node) -> tuple[str, ...]:
    return tuple(sorted(gpu.name for gpu in node.hardware.gpus))


def _scope_of(a: Node, b: Node) -> tuple[str, str]:
    """The names of two nodes, and their addresses in the same order."""
    ends = sorted((node.name, node.address or "") for node in (a, b))
    return ",".join(name for name, _ in ends), ",".join(address for _, address in ends)


def _common_rdma(a: Node, b: Node) -> RdmaKind | None:
    if a.rdma is None or b.rdma is None:
        return None
    return a.rdma.kind if a.rdma.kind == b.rdma.kind else "none"


def _port_rate(a: Node, b: Node) -> float | None:
    rates = [node.rdma.bytes_s for node in (a, b) if node.rdma is not None]
    known_rates = [rate for rate in rates if rate is not None]
    return min(known_rates) if len(known_rates) == len(rates) else None


def _round_digits(value: float) -> int:
    """The value with as many digits as a measurement repeats."""
    digits = _DIGITS - 1 - math.floor(math.log10(value)) if value > 0 else 0
    return int(round(value, min(digits, 0)))
