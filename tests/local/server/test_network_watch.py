"""The watch of the networks between machines, with machines that answer at once."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.domain import Cluster, Network, Node
from gateway.errors import HostError
from gateway.planner.nodes.measured_networks import MeasuredNetworks
from gateway.profiles.profiles import Profiles
from gateway.server import network_watch
from gateway.server.network_watch import NetworkWatch
from gateway.store.store import Store
from tests.support.log_lines import capture_logs
from tests.support.paths import ROOT
from tests.support.patience import hang_s

pytestmark = pytest.mark.anyio

GB10 = Profiles().hardware("gb10")


def node(number: int) -> Node:
    return Node(name=f"node-{number}", hardware=GB10, address=f"10.0.0.{number}")


class Machines:
    """Machines whose networks are measured immediately."""

    def __init__(self, count: int) -> None:
        self.nodes = [node(number) for number in range(count)]
        self.measured_pairs: list[tuple[str, str]] = []
        self.problem = ""
        self.on_change: Callable[[], object] = lambda: None
        self.under_way = 0
        self.most_under_way = 0

    async def cluster(self) -> Cluster:
        if not self.nodes:
            raise HostError("no machine", hint="")
        return Cluster(nodes=tuple(self.nodes))

    async def measure_network(self, a: str, b: str) -> Network:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        self.measured_pairs.append((a, b))
        if self.problem:
            raise HostError(self.problem, hint="")
        return Network(tcp_bytes_s=1e9, latency_s=1e-5)


@asynccontextmanager
async def open_watch(
    machines: Machines, folder: Path, is_busy: Callable[[], bool] = lambda: False
) -> AsyncIterator[tuple[NetworkWatch, Store]]:
    async def ask() -> bool:
        return is_busy()

    store = Store(folder / "fitserve.db")
    watch = NetworkWatch(machines, store, ask)  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(hang_s()):
            yield watch, store
    finally:
        await watch.close()
        store.close()


def knowledge(store: Store, nodes: Sequence[Node]) -> list[bool]:
    links = MeasuredNetworks(store.facts()).links(nodes)
    return [link.tcp_bytes_s is not None for link in links]


async def test_each_pair_is_measured_once_and_one_at_a_time(
    tmp_path: Path, anyio_backend: str
) -> None:
    machines = Machines(3)
    async with open_watch(machines, tmp_path) as (watch, store):
        await watch.settle()
        assert knowledge(store, machines.nodes) == [True] * 3
        machines.nodes.append(node(3))
        machines.on_change()
        await watch.settle()
        assert knowledge(store, machines.nodes) == [True] * 6
        assert len(watch.links) == 6
    async with open_watch(machines, tmp_path) as (watch, _):
        await watch.settle()
    assert len(machines.measured_pairs) == len(set(machines.measured_pairs)) == 6
    assert machines.most_under_way == 1


async def test_nothing_is_measured_while_requests_are_at_work(
    tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_watch, "_BUSY_S", 0.01)
    machines, looks = Machines(2), 0

    def is_busy() -> bool:
        nonlocal looks
        looks += 1
        return looks < 4

    async with open_watch(machines, tmp_path, is_busy) as (watch, store):
        # A plan does not wait for the requests.
        await watch.settle()
        assert machines.measured_pairs == []
        while not store.facts():
            await asyncio.sleep(0.01)
    assert looks == 4


async def test_a_pair_that_cannot_be_measured_stays_unknown_and_holds_nothing_up(
    tmp_path: Path, anyio_backend: str
) -> None:
    machines = Machines(2)
    machines.problem = "a firewall is between them"
    async with open_watch(machines, tmp_path) as (watch, store):
        await watch.settle()
        machines.on_change()
        await watch.settle()
        assert knowledge(store, machines.nodes) == [False]
    assert machines.measured_pairs == [("node-0", "node-1")]


async def test_the_problem_of_a_pair_is_logged_once_until_it_changes(
    tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_watch, "_RETRY_S", 0.0)
    machines = Machines(2)

    async def try_with(problem: str) -> None:
        """Let the pair be measured twice more, or once where nothing is wrong."""
        machines.problem = problem
        count = len(machines.measured_pairs)
        while len(machines.measured_pairs) < count + 3 and not watch.links[0].tcp_bytes_s:
            await asyncio.sleep(0)

    with capture_logs() as lines:
        machines.problem = "a firewall is between them"
        async with open_watch(machines, tmp_path) as (watch, store):
            while not watch.links:
                await asyncio.sleep(0)
            await try_with("a firewall is between them")
            await try_with("the network is in use")
            await try_with("")
            # One of the machines is at another address, where nothing was measured.
            machines.nodes[1] = machines.nodes[1].evolve(address="10.0.0.9")
            machines.problem = "the network is in use"
            machines.on_change()
            await watch.settle()
            assert knowledge(store, machines.nodes) == [False]
    reasons = [line["reason"] for line in lines if "is not measured" in line["event"]]
    assert reasons == [
        "a firewall is between them",
        "the network is in use",
        "the network is in use",
    ]


async def test_a_cluster_without_machines_holds_no_plan_up(
    tmp_path: Path, anyio_backend: str
) -> None:
    async with open_watch(Machines(0), tmp_path) as (watch, _):
        await watch.settle()
        assert not watch.links


def test_a_gateway_of_one_machine_imports_nothing_of_a_cluster() -> None:
    """Ray alone takes seconds of processor time."""
    program = (
        "import sys, gateway.server.server, gateway.server.app, gateway.cli.registry\n"
        "names = ('ray', 'gateway.hosts.cluster', 'gateway.server.network_watch',"
        " 'gateway.planner.nodes')\n"
        "print([module for module in sys.modules if module.startswith(names)])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout == "[]\n"
