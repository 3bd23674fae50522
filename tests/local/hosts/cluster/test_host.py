"""The choice of machines: by GPUs, ports and engines, with node services and a link without Ray."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import Hardware, LaunchSpec, NodeLaunch
from gateway.errors import AgentAway, HostError
from gateway.hosts.agent.calls import MAX_BYTES_OF_ANSWER
from gateway.hosts.cluster import host as cluster_host
from gateway.hosts.cluster import node_service
from gateway.hosts.cluster.host import ClusterHost
from gateway.hosts.cluster.membership import Membership, folder, node_socket
from gateway.hosts.cluster.node_host import ENVIRONMENT
from gateway.hosts.cluster.node_service import NodeService
from gateway.hosts.nodes_host import NodesHost
from gateway.profiles.profiles import Profiles
from tests.contract.harness import until
from tests.contract.memory_harness import MemoryHarness
from tests.support.hub_commits import disk_of
from tests.support.log_lines import capture_logs
from tests.support.memory_host import World
from tests.support.patience import hang_s

pytestmark = pytest.mark.anyio

NAMES = ("one", "two")


def machine(name: str) -> Hardware:
    """A snapshot with GPUs of its own."""
    hardware = Profiles().hardware("2x3090")
    gpus = tuple(gpu.evolve(uuid=f"GPU-{name}-{gpu.index}") for gpu in hardware.gpus)
    return hardware.evolve(gpus=gpus)


class ScriptedLink:
    """A link without Ray: passes calls to the sockets of the node services."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names = list(NAMES)
        self.worlds: dict[str, World] = {}
        self.listens = {name: asyncio.Event() for name in NAMES}
        """Unset: calls of the machine get no answer yet."""
        for event in self.listens.values():
            event.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.send_calls: list[dict[str, Any]] = []
        """Calls for the bytes of files, in order."""
        self.passed_bytes: int | None = None
        """Bytes after which the way between machines breaks; None: it does not."""

    def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all calls: an engine's log may have no end."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with AsyncExitStack() as stack:
            stack.callback(writer.close)
            await self._pass(reader, writer, stack)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stack: AsyncExitStack
    ) -> None:
        order = json.loads(await reader.readline())
        name = order["node"]
        if name:
            call = await reader.readline()
            await self.listens[name].wait()
            answers, calls = await asyncio.open_unix_connection(
                node_socket(self.root / name), limit=MAX_BYTES_OF_ANSWER
            )
            stack.callback(calls.close)
            calls.write(call)
            if source := order.get("source"):
                await self._feed(calls, source, await reader.readline())
            is_last = False
            while not is_last and (line := await answers.readline()):
                writer.write(line)
                is_last = json.loads(line)["answer"] in ("done", "failed")
        else:
            nodes = [
                {"name": name, "address": "127.0.0.1", "state": "alive"} for name in self.names
            ]
            writer.write(json.dumps(nodes).encode() + b"\n")
        # The caller may have left.
        with suppress(OSError):
            await writer.drain()

    async def _feed(self, calls: asyncio.StreamWriter, source: str, line: bytes) -> None:
        """Pass the answer of another machine on, up to the bytes that the link passes."""
        self.send_calls.append(json.loads(line))
        path = node_socket(self.root / source)
        answers, source_calls = await asyncio.open_unix_connection(path)
        source_calls.write(line)
        answer = await answers.read()
        calls.write(answer[: self.passed_bytes])
        if self.passed_bytes is not None:
            calls.write_eof()
        with suppress(OSError):
            await calls.drain()
        source_calls.close()


@asynccontextmanager
async def two_machines(root: Path) -> AsyncIterator[tuple[ClusterHost, ScriptedLink]]:
    link = ScriptedLink(root)
    async with AsyncExitStack() as stack:
        for name in NAMES:
            membership = Membership(
                name=name,
                role="node",
                head="127.0.0.1:6379",
                address="127.0.0.1",
                token_file=root / "token",
            )
            folder(root / name).mkdir(parents=True)
            harness = MemoryHarness()
            link.worlds[name] = harness.host.world
            stack.push_async_callback(harness.cleanup)
            service = NodeService(harness.host, membership, root / name, disk_of(root / name), 0)
            await stack.enter_async_context(service.running())
        server = await asyncio.start_unix_server(link.serve, root / "link.sock")
        stack.push_async_callback(link.close)
        async with server:
            yield ClusterHost(root / "link.sock", "a"), link


@pytest.fixture
async def machines(
    tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[ClusterHost, ScriptedLink]]:
    monkeypatch.setattr(node_service, "probe", lambda data: machine(data.name))
    async with two_machines(tmp_path) as machines:
        yield machines


async def test_an_engine_starts_on_the_machine_of_its_gpus(
    machines: tuple[ClusterHost, ScriptedLink],
) -> None:
    host, _ = machines
    plain = MemoryHarness().make_spec("a1")
    for number, name in enumerate(("two", "two", "one")):
        gpus = (f"GPU-{name}-0", f"GPU-{name}-1")
        port = await host.allocate_port()
        spec = plain.evolve(name=f"a{number}", gpus=gpus, port=port)
        assert (await host.start(spec)).node == name
    ports = [instance.url for instance in await host.list()]
    assert len(set(ports)) == 3
    with pytest.raises(HostError, match="No machine of the cluster has all of the GPUs"):
        await host.start(plain.evolve(name="b1", gpus=("GPU-one-0", "GPU-two-0")))


async def test_the_planner_sees_the_machines_that_start_engines(
    machines: tuple[ClusterHost, ScriptedLink],
) -> None:
    host, link = machines
    nodes = (await host.cluster()).nodes
    assert [(node.name, node.hardware.gpus[0].uuid) for node in nodes] == [
        ("one", "GPU-one-0"),
        ("two", "GPU-two-0"),
    ]
    changes: list[str] = []
    host.on_change = lambda: changes.append("change")
    for names, number in ((NAMES, 1), (NAMES, 1), (("one",), 2), (NAMES, 3)):
        link.names = [*names]
        await host.list()
        assert len(changes) == number
    await host.node("two").drain(is_drained=True)
    assert [node.name for node in (await host.cluster()).nodes] == ["one"]
    link.names = ["two"]
    with pytest.raises(HostError, match="No machine of the cluster starts engines") as error:
        await host.cluster()
    assert "cluster status" in error.value.hint
    link.names = []
    with pytest.raises(HostError, match="has no machine"):
        await host.identity(MemoryHarness().make_spec("a1").engine)


async def test_a_machine_that_is_slow_to_answer_is_named_or_awaited(
    machines: tuple[ClusterHost, ScriptedLink],
) -> None:
    """Commands wait longer than a gateway: their first call starts an actor."""
    _, link = machines
    link.listens["two"].clear()
    path = link.root / "link.sock"
    with pytest.raises(AgentAway, match="The machine two does not answer"):
        await ClusterHost(path, "", answer_s=0.2).node("two").drain(is_drained=True)
    draining = asyncio.create_task(
        ClusterHost(path, "", answer_s=hang_s()).node("two").drain(is_drained=True)
    )
    await asyncio.sleep(0.4)
    link.listens["two"].set()
    view = await draining
    assert view is not None
    assert view.is_drained


async def test_engines_that_are_planned_together_are_spread(
    machines: tuple[ClusterHost, ScriptedLink],
) -> None:
    host, _ = machines
    plain = MemoryHarness().make_spec("a1")
    ports = await asyncio.gather(*(host.allocate_port() for _ in range(4)))
    assert len({*ports}) == 4
    specs = [plain.evolve(name=f"a{port}", port=port) for port in ports]
    instances = await asyncio.gather(*map(host.start, specs))
    assert sorted(instance.node for instance in instances) == ["one", "one", "two", "two"]


async def test_machines_are_shown_with_their_engines(
    machines: tuple[ClusterHost, ScriptedLink],
) -> None:
    host, _ = machines
    spec = MemoryHarness().make_spec("a1").evolve(gpus=("GPU-two-0",))
    instance = await host.start(spec)
    await host.node("one").drain(is_drained=True)
    first_view, two = await host.machine_views()
    assert (first_view.state, first_view.engines, first_view.address) == (
        "drained",
        (),
        "127.0.0.1",
    )
    assert (two.state, two.engines, two.owner) == ("ready", (instance.name,), "a")
    assert len(two.gpus) == 2


def over_both(name: str, *names: str) -> LaunchSpec:
    """The start of an engine with a part on each of the machines."""
    plain = MemoryHarness().make_spec(name)
    rows = tuple(
        NodeLaunch(
            node=node,
            argv=plain.argv if node == names[0] else (*plain.argv, "--no-serve"),
            env={},
            gpus=(f"GPU-{node}-0",),
        )
        for node in names
    )
    return plain.evolve(nodes=rows)


async def test_an_engine_over_two_machines_starts_and_ends_on_both(
    machines: tuple[ClusterHost, ScriptedLink],
) -> None:
    host = NodesHost(machines[0])
    instance = await host.start(over_both("a1", "two", "one"))
    assert (instance.name, instance.node) == ("a1", "two")
    parts = {instance.name: instance.node for instance in await machines[0].list()}
    assert parts == {"a1-n0of2": "two", "a1-n1of2": "one"}
    assert await host.list() == [instance]
    await host.stop("a1", 0)
    assert await machines[0].list() == []


async def test_a_missing_machine_leaves_no_part_of_an_engine(
    machines: tuple[ClusterHost, ScriptedLink],
) -> None:
    host, link = machines
    link.names = ["one"]
    with pytest.raises(HostError, match="needs the machine two, which is not in the cluster"):
        await NodesHost(host).start(over_both("a1", "one", "two"))
    assert await host.list() == []


async def test_a_start_is_announced_to_the_machines_that_will_run_it(
    machines: tuple[ClusterHost, ScriptedLink],
) -> None:
    host, link = machines
    plain = MemoryHarness().make_spec("a1").evolve(argv=(f"{ENVIRONMENT}/bin/python", "-m", "e"))
    await NodesHost(host).prepare_fork(plain.evolve(gpus=("GPU-two-0",)))
    await NodesHost(host).prepare_fork(over_both("a2", "one", "two"))
    names = {name: [spec.name for spec in world.expected] for name, world in link.worlds.items()}
    assert names == {"one": ["a2-n0of2"], "two": ["a1", "a2-n1of2"]}
    program = link.worlds["two"].expected[0].argv[0]
    assert program.startswith(str(link.root / "two" / "engines"))


async def test_a_rank_without_a_port_counts_for_a_while_after_its_machine_is_lost(
    machines: tuple[ClusterHost, ScriptedLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, link = machines
    spec = over_both("a1", "one", "two")
    # Both machines have one address here, and the first rank would take the connection.
    rows = tuple(row.evolve(argv=spec.nodes[1].argv) for row in spec.nodes)
    await NodesHost(host).start(spec.evolve(nodes=rows))
    (first, second) = await host.list()
    link.names = ["one"]
    # Its raylet may be back soon, and the machine refuses the connection: it is there.
    assert await host.list() == [first, second]
    monkeypatch.setattr(cluster_host, "_RETURN_S", 0)
    assert await host.list() == [first]
    (engine,) = await NodesHost(host).list()
    assert engine.state == "created"


async def test_a_silent_machine_has_its_last_engines_until_it_answers(
    machines: tuple[ClusterHost, ScriptedLink],
) -> None:
    host, link = machines
    instance = await host.start(MemoryHarness().make_spec("a1").evolve(gpus=("GPU-two-0",)))
    assert await host.list() == [instance]
    link.listens["two"].clear()
    for _ in range(3):
        assert await host.list() == [instance]
    await link.worlds["two"].engines["a1"].end(0)
    del link.worlds["two"].engines["a1"]
    link.listens["two"].set()

    async def is_gone() -> bool:
        return await host.list() == []

    await until("the answer counts", is_gone)


async def test_a_machine_of_another_gateway_is_logged_once_until_it_is_ours(
    machines: tuple[ClusterHost, ScriptedLink],
) -> None:
    host, link = machines
    stranger = ClusterHost(link.root / "link.sock", "b")
    assert await host.list() == []
    with capture_logs() as lines:
        for _ in range(3):
            assert await stranger.list() == []
    reasons = [line["reason"] for line in lines if line["event"].endswith("is not ours")]
    assert len(reasons) == len(NAMES)
    assert all(reason.startswith("Another gateway owns this machine") for reason in reasons)


async def test_an_engine_that_has_just_started_is_known_of_a_silent_machine(
    machines: tuple[ClusterHost, ScriptedLink],
) -> None:
    host, link = machines
    assert await host.list() == []
    instance = await host.start(MemoryHarness().make_spec("a1").evolve(gpus=("GPU-two-0",)))
    link.listens["two"].clear()
    assert await host.list() == [instance]
    link.listens["two"].set()

    async def has_answered() -> bool:
        return await host.list() == [instance] and not host._silent_calls

    await until("the machine answers", has_answered)


async def test_an_engine_that_has_just_started_counts_for_the_next_port(
    machines: tuple[ClusterHost, ScriptedLink],
) -> None:
    host, _ = machines
    plain = MemoryHarness().make_spec("a1")
    nodes = []
    for number in range(4):
        spec = plain.evolve(name=f"a{number}", port=await host.allocate_port())
        nodes.append((await host.start(spec)).node)
    assert nodes == ["one", "two", "one", "two"]


async def test_a_machine_is_known_with_its_interface_and_busy_ports(
    machines: tuple[ClusterHost, ScriptedLink],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        (first, _) = (await machines[0].cluster()).nodes
        assert server.getsockname()[1] in first.ports
    assert first.interface == "lo"
