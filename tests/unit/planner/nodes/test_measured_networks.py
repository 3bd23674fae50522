"""Measured networks between nodes, as facts."""

from __future__ import annotations

import pytest

from gateway.domain import Network, Node, RdmaPort
from gateway.planner.nodes.measured_networks import MeasuredNetworks, network_facts
from gateway.profiles.profiles import Profiles

PROFILES = Profiles()
FIGURES = Network(tcp_bytes_s=1_183_400_000.0, latency_s=0.000_031_6)
ROCE = RdmaPort(kind="roce", bytes_s=25e9)


def node(name: str, machine: str = "gb10", rdma: RdmaPort | None = None) -> Node:
    return Node(name=name, hardware=PROFILES.hardware(machine), address=f"10.0.0.{name}", rdma=rdma)


def measurement(a: Node, b: Node) -> MeasuredNetworks:
    return MeasuredNetworks(network_facts(a, b, FIGURES, 5.0))


def test_a_measurement_holds_for_both_directions_and_has_its_date() -> None:
    a, b = node("1"), node("2")
    link = measurement(b, a).link(a, b)
    assert link == measurement(a, b).link(b, a)
    assert link is not None
    assert (link.a, link.b, link.tcp_bytes_s, link.measured_at) == ("1", "2", 1.2e9, 5.0)
    assert link.latency_s == pytest.approx(3.2e-5)


def test_a_node_at_another_address_was_not_measured() -> None:
    a, b = node("1"), node("2")
    assert measurement(a, b).link(a, b.evolve(address="10.0.1.2")) is None


@pytest.mark.parametrize(
    ("first", "second", "kind", "bytes_s"),
    [
        (ROCE, ROCE.evolve(bytes_s=12.5e9), "roce", 12.5e9),
        (ROCE, RdmaPort(kind="infiniband", bytes_s=25e9), "none", None),
        (ROCE, RdmaPort(kind="none"), "none", None),
        (ROCE, RdmaPort(kind="roce"), "roce", None),
        (ROCE, None, None, None),
    ],
)
def test_rdma_counts_where_both_ends_have_it(
    first: RdmaPort, second: RdmaPort | None, kind: str | None, bytes_s: float | None
) -> None:
    a, b = node("1", rdma=first), node("2", rdma=second)
    link = measurement(a, b).link(a, b)
    assert link is not None
    assert (link.rdma, link.bytes_s) == (kind, bytes_s)


def test_ports_without_a_measurement_say_nothing_about_the_network() -> None:
    a, b = node("1", rdma=ROCE), node("2", rdma=ROCE)
    assert MeasuredNetworks().link(a, b) is None
    (link,) = MeasuredNetworks().links([a, b])
    assert (link.bytes_s, link.tcp_bytes_s, link.rdma) == (None, None, "roce")


def test_only_nodes_that_one_engine_could_span_are_paired() -> None:
    nodes = [node("1"), node("2"), node("3", "3090"), node("4", "cpu"), node("5", "cpu")]
    links = MeasuredNetworks().links([*nodes, node("6").evolve(address=None)])
    assert [(link.a, link.b) for link in links] == [("1", "2")]


def test_the_pairs_grow_with_the_number_of_nodes() -> None:
    nodes = [node(f"{number:03}") for number in range(100)]
    assert len(MeasuredNetworks().links(nodes)) == 12 * 28 + 6
