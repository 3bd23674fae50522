"""Engines over two nodes: two process hosts with folders of their own, ranks that meet over a
socket, and a gateway that dies between."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple

import pytest

from gateway.diagnosis.log_reader import LogReader
from gateway.domain import Instance, LaunchSpec, NodeLaunch
from gateway.errors import Conflict, HostError
from gateway.hosts.nodes_host import NodesHost
from gateway.hosts.process.host import ProcessHost
from gateway.profiles.profiles import Profiles
from tests.support.memory_host import MemoryHost
from tests.support.separate_hosts import SeparateHosts
from tests.support.versions import VLLM_REF

from .harness import answering, find, get, until, wait_for_exit
from .memory_harness import MemoryHarness
from .process_harness import ProcessHarness, free_port, living_in

pytestmark = pytest.mark.anyio

NAME = "m-r0-a1"
# The words of a rank without memory, and of the rank that only loses its peer.
CAUSE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"
    " capacity of 23.69 GiB of which 1.00 GiB is free."
)
LOST = (
    "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network"
    " error"
)
# The first node answers requests once the second has met it, and waits for ever when that is lost.
LEADER = """
import http.server, socket, sys, threading, time
meeting, port = int(sys.argv[1]), int(sys.argv[2])
print("waiting for ranks", flush=True)
peer = socket.create_server(("127.0.0.1", meeting)).accept()[0]
print("all ranks are here", flush=True)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Answer)
threading.Thread(target=server.serve_forever, daemon=True).start()
while peer.recv(1):
    pass
print(sys.argv[3], flush=True)
time.sleep(600)
"""
# The other node computes until it is told to fail, by a file.
WORKER = """
import os, socket, sys, time
meeting, order = int(sys.argv[1]), sys.argv[2]
while True:
    try:
        leader = socket.create_connection(("127.0.0.1", meeting))
        break
    except OSError:
        time.sleep(0.05)
print("met the first node", flush=True)
while not os.path.exists(order):
    time.sleep(0.05)
print(sys.argv[3], flush=True)
sys.exit(1)
"""


def nodes_host(hosts: Mapping[str, ProcessHost]) -> NodesHost:
    return NodesHost(SeparateHosts(hosts))


class Nodes(NamedTuple):
    """Two machines in folders of their own, and the start of an engine over both."""

    harnesses: dict[str, ProcessHarness]
    spec: LaunchSpec
    order: Path

    def host(self) -> NodesHost:
        """As a gateway makes it at its start: new hosts, which know nothing."""
        return nodes_host(
            {node: ProcessHost(member.data_dir) for node, member in self.harnesses.items()}
        )

    def members(self) -> list[int]:
        """Processes of the engine on each node."""
        return [
            len(living_in(member.data_dir / "run" / f"{NAME}-n{place}of2"))
            for place, member in enumerate(self.harnesses.values())
        ]


@pytest.fixture
async def nodes(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Nodes]:
    harnesses = {name: ProcessHarness(tmp_path / name) for name in ("one", "two")}
    meeting, order = free_port(), tmp_path / "order"
    spec = harnesses["one"].make_spec(NAME)

    def part(node: str, source: str, *words: object) -> NodeLaunch:
        argv = (sys.executable, "-S", "-c", source, *map(str, words))
        return NodeLaunch(node=node, argv=argv, env={}, gpus=())

    rows = (
        part("one", LEADER, meeting, spec.port, LOST),
        part("two", WORKER, meeting, order, CAUSE),
    )
    new_nodes = Nodes(harnesses, spec.evolve(nodes=rows), order)
    yield new_nodes
    await new_nodes.host().stop(NAME, 0)
    for harness in harnesses.values():
        await harness.cleanup()


async def test_all_parts_start_and_stop_together(nodes: Nodes) -> None:
    host = nodes.host()
    instance = await host.start(nodes.spec)
    assert (instance.name, instance.state) == (NAME, "running")
    await answering(instance)
    assert await host.list() == [instance]
    assert (await host.start(nodes.spec)).name == NAME
    assert nodes.members() == [1, 1]
    with pytest.raises(Conflict):
        await host.start(nodes.spec.evolve(fingerprint="other"))
    await host.stop(NAME, 5)
    assert await host.list() == []
    assert nodes.members() == [0, 0]


async def test_the_failure_of_a_part_is_that_of_the_engine_with_its_proof(nodes: Nodes) -> None:
    """The first node only sees that its peer is lost, and would wait for ever."""
    host = nodes.host()
    await answering(await host.start(nodes.spec))
    nodes.order.touch()
    exit_state = await wait_for_exit(host, NAME)
    assert exit_state.exit_code == 1
    assert nodes.members()[0] == 1
    reader = LogReader(Profiles().signatures, VLLM_REF)
    lines = []
    async with aclosing(host.follow(NAME)) as log:
        async for line in log:
            reader.read(line)
            lines.append(line.decode())
    assert any(LOST in line for line in lines)
    assert f"(two pid=1) {CAUSE}" in lines
    reader.close()
    assert reader.failure is not None
    assert reader.failure.kind == "gpu_oom"
    await host.stop(NAME, 5)
    assert nodes.members() == [0, 0]


async def test_the_next_gateway_adopts_all_parts(nodes: Nodes) -> None:
    await answering(await nodes.host().start(nodes.spec))
    instance = await find(nodes.host(), NAME)
    assert instance is not None
    assert (instance.state, instance.fingerprint) == ("running", nodes.spec.fingerprint)
    assert (await get(instance, "/health"))[0] == 200
    lines = []
    async with aclosing(nodes.host().follow(NAME)) as log:
        async for line in log:
            lines.append(line)
            if len(lines) == 3:
                break
    assert {*lines} == {
        b"waiting for ranks",
        b"all ranks are here",
        b"(two pid=1) met the first node",
    }
    await nodes.host().stop(NAME, 5)
    assert nodes.members() == [0, 0]


async def test_a_part_that_cannot_start_leaves_none(nodes: Nodes) -> None:
    first, second = nodes.spec.nodes
    broken_spec = nodes.spec.evolve(nodes=(first, second.evolve(argv=("/nowhere/engine",))))
    host = nodes.host()
    with pytest.raises(HostError):
        await host.start(broken_spec)
    assert await host.list() == []
    assert nodes.members() == [0, 0]


async def test_an_interrupted_start_over_nodes_starts_from_the_beginning(nodes: Nodes) -> None:
    """The gateway died between the starts of two parts."""
    await ProcessHost(nodes.harnesses["one"].data_dir).start(
        nodes.spec.evolve(name=f"{NAME}-n0of2", argv=nodes.spec.nodes[0].argv, nodes=())
    )
    (former,) = living_in(nodes.harnesses["one"].data_dir / "run" / f"{NAME}-n0of2")
    host = nodes.host()
    cut = await find(host, NAME)
    assert cut is not None
    assert cut.state == "created"
    await answering(await host.start(nodes.spec))
    assert nodes.members() == [1, 1]
    assert living_in(nodes.harnesses["one"].data_dir / "run" / f"{NAME}-n0of2") != [former]


async def test_a_missing_node_is_named(nodes: Nodes) -> None:
    hosts = {"one": ProcessHost(nodes.harnesses["one"].data_dir)}
    with pytest.raises(HostError, match="two, which is not a node here"):
        await nodes_host(hosts).start(nodes.spec)
    assert nodes.members() == [0, 0]


async def test_an_engine_on_one_node_is_that_of_its_host(nodes: Nodes) -> None:
    host = nodes.host()
    instance = await host.start(nodes.harnesses["one"].make_spec("alone"))
    await answering(instance)
    first_instances = await nodes.harnesses["one"].host.list()
    assert [instance.evolve(node="one") for instance in first_instances] == [instance]
    await host.stop("alone", 5)

    async def is_gone() -> bool:
        return await host.list() == []

    await until("nothing is left", is_gone)


async def test_a_look_at_an_engine_asks_no_other_node() -> None:
    """Each of hundreds of engines is looked at all the time."""

    class Counted(MemoryHost):
        listings = 0

        async def list(self) -> list[Instance]:
            self.listings += 1
            return await super().list()

    harness = MemoryHarness()
    node_host = Counted(world=harness.world)
    host = NodesHost(node_host)
    name = (await host.start(harness.make_spec(NAME))).name
    await host.list()
    former_count = node_host.listings
    assert await host.processes(name)
    assert node_host.listings == former_count
    await harness.cleanup()
