"""The network between machines of a cluster: its measurement over real Ray, and its firewall."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.domain import Network
from gateway.errors import HostError
from gateway.hosts.nodes_host import NodesHost
from gateway.server import network_watch
from tests.support.cluster_nodes import ClusterNode
from tests.support.running import running

from .cluster_harness import OWNER, ClusterHarness
from .harness import until
from .test_cluster_gateway import MachinesWithGpus, options

pytestmark = pytest.mark.anyio


@contextmanager
def traffic_shaper(node: ClusterNode, rate: str) -> Iterator[None]:
    """Skips the test where the kernel shapes no traffic."""
    qdisc = ("dev", "eth0", "root")
    shaper = ("tbf", "rate", rate, "burst", "32kb", "latency", "100ms")
    try:
        _run("tc", "-n", node.namespace, "qdisc", "add", *qdisc, *shaper)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"the kernel shapes no traffic: {error}")
    try:
        yield
    finally:
        _run("tc", "-n", node.namespace, "qdisc", "del", *qdisc)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


async def measured_network(cluster: ClusterHarness) -> Network:
    """The network, once the machines are quiet."""
    while True:
        try:
            return await cluster.host.measure_network("one", "two")
        except HostError as error:
            if not any(words in str(error) for words in ("carries", "measures another")):
                raise
            await asyncio.sleep(0.5)


async def test_a_slow_network_is_measured_as_slow(cluster: ClusterHarness) -> None:
    with traffic_shaper(cluster.nodes.second, "16mbit"):
        slow_network = await measured_network(cluster)
    assert slow_network.tcp_bytes_s is not None
    # The shaper lets no more through, in one of the two directions.
    assert slow_network.tcp_bytes_s < 2.6e6
    fast_network = await measured_network(cluster)
    assert fast_network.tcp_bytes_s is not None
    assert fast_network.tcp_bytes_s > slow_network.tcp_bytes_s


async def test_the_doctor_of_another_machine_tests_the_firewall(cluster: ClusterHarness) -> None:
    """The machines have a further network, into which Ray listens too."""
    first_node, second_node = cluster.nodes.nodes
    number = first_node.address.split(".")[2]
    for node, end in ((first_node, 1), (second_node, 2)):
        address = f"10.215.{number}.{end}/24"
        _run("ip", "-n", node.namespace, "addr", "add", address, "dev", "eth0", "label", "eth0:1")
    drop_rule = ("INPUT", "-d", f"10.215.{number}.2", "-p", "tcp", "-j", "DROP")
    iptables = ("ip", "netns", "exec", second_node.namespace, "iptables")
    warning = "Ray or engines answer outside the network of the cluster"
    try:
        report = await asyncio.to_thread(first_node.fitserve, "doctor")
        assert warning in " ".join(report.stdout.split()), report.stdout + report.stderr
        assert f"two at 10.215.{number}.2:" in report.stdout
        _run(*iptables, "-I", *drop_rule)
        report = await asyncio.to_thread(first_node.fitserve, "doctor")
        _run(*iptables, "-D", *drop_rule)
        assert warning not in " ".join(report.stdout.split())
        assert "the head at" in report.stdout
    finally:
        for node, end in ((first_node, 1), (second_node, 2)):
            address = f"10.215.{number}.{end}/24"
            _run("ip", "-n", node.namespace, "addr", "del", address, "dev", "eth0")


async def test_a_gateway_measures_the_machines_that_an_engine_could_span(
    cluster: ClusterHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine that has just started is not quiet.
    monkeypatch.setattr(network_watch, "_RETRY_S", 0.5)
    (tmp_path / "own").mkdir()
    host = NodesHost(MachinesWithGpus(cluster.nodes.link, OWNER, data=tmp_path / "data"))
    async with running(tmp_path, lambda _: None, host=host, **options(tmp_path)) as gateway:  # type: ignore[arg-type, return-value]

        async def is_measured() -> bool:
            links = (await gateway.client.get("/admin/machines")).json()["links"]
            return bool(links) and all("tcp_bytes_s" in link for link in links)

        await until("the network is measured", is_measured)
        (link,) = (await gateway.client.get("/admin/machines")).json()["links"]
        assert (link["a"], link["b"]) == ("one", "two")
        facts = (await gateway.client.get("/admin/facts")).json()["data"]
        rows = [row["fact"] for row in facts if row["fact"]["kind"] == "network_speed"]
        assert {row["scope"]["what"] for row in rows} == {"bandwidth", "latency"}
        assert link["measured_at"] == rows[0]["at"]
