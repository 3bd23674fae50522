"""The node service without Ray: its lease, its owner, and engines that no gateway claims."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.domain import LaunchSpec
from gateway.engines.common.trace_flags import ENDPOINT, LIBRARY, SERVICE_VARIABLE
from gateway.errors import AgentRefusal, HostError
from gateway.hosts.agent.calls import ListenCall
from gateway.hosts.agent.host import AgentHost
from gateway.hosts.cluster import node_service
from gateway.hosts.cluster.membership import Membership, folder, node_socket
from gateway.hosts.cluster.networks.measurement import measure_between
from gateway.hosts.cluster.node_host import ENVIRONMENT
from gateway.hosts.cluster.node_service import NodeService
from gateway.machine import network
from gateway.machine.environment import engine_dir
from tests.contract.harness import answering, get, until
from tests.contract.process_harness import ProcessHarness
from tests.support.hub_commits import disk_of
from tests.support.patience import hang_s

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def service(world: ProcessHarness, lease_s: float) -> AsyncIterator[None]:
    membership = Membership(
        name="one",
        role="head",
        head="127.0.0.1:6379",
        address="127.0.0.1",
        token_file=world.data_dir / "token",
        lease_s=lease_s,
    )
    folder(world.data_dir).mkdir(exist_ok=True)
    async with NodeService(
        world.restart(), membership, world.data_dir, disk_of(world.data_dir), 0
    ).running():
        yield


@pytest.fixture
async def world(tmp_path: Path, anyio_backend: str) -> AsyncIterator[ProcessHarness]:
    process_harness = ProcessHarness(tmp_path)
    yield process_harness
    process_harness.restart()
    await process_harness.cleanup()


def gateway(world: ProcessHarness, owner: str) -> AgentHost:
    return AgentHost(node_socket(world.data_dir), owner=owner)


async def test_engines_without_a_gateway_are_stopped_after_the_lease(
    world: ProcessHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(node_service, "_boot_seconds", lambda: now_s)
    monkeypatch.setattr(node_service, "_LOOK_S", 0.01)
    async with service(world, lease_s=60):
        instance = await gateway(world, "a").start(world.make_spec("a1"))
        await answering(instance)
        # Calls of its gateway keep the engine for longer than the lease.
        for _ in range(3):
            now_s += 59
            await asyncio.sleep(0.1)
            assert [instance.state for instance in await gateway(world, "a").list()] == ["running"]
        assert (await get(instance, "/health"))[0] == 200
        now_s += 61

        async def is_stopped() -> bool:
            # A call without an owner claims nothing.
            return await gateway(world, "").list() == []

        await until("the engine is stopped", is_stopped)
        assert world.members("a1") == 0
        assert not (folder(world.data_dir) / "lease.json").exists()
        assert await gateway(world, "b").list() == []


async def test_logs_of_engines_that_ended_long_ago_are_removed(world: ProcessHarness) -> None:
    await world.host.start(world.make_spec("a1"))
    logs = world.data_dir / "logs"
    names = ("a1.log", "a2.log", "a2.log.1", "a3.log", "cluster/a2.log")
    (logs / "cluster").mkdir()
    for name in names:
        (logs / name).touch()
        if name != "a3.log":
            os.utime(logs / name, (0, 0))
    async with service(world, lease_s=300):

        async def are_few() -> bool:
            return not (logs / "a2.log").exists() and not (logs / "a2.log.1").exists()

        await until("old logs are removed", are_few)
    log_files = {str(path.relative_to(logs)) for path in logs.rglob("*.log*")}
    assert log_files == {"a1.log", "a3.log", "cluster/a2.log"}


async def test_calls_that_the_end_of_the_service_cuts_off_log_no_fault(
    world: ProcessHarness, caplog: pytest.LogCaptureFixture
) -> None:
    await world.host.start(world.make_spec("a1"))
    with (world.data_dir / "logs/a1.log").open("a") as file:
        file.write("a line\n")
    async with service(world, lease_s=300):
        log = gateway(world, "a").follow("a1")
        assert await anext(log)
        lines = asyncio.ensure_future(anext(log))
        await asyncio.sleep(0)
    lines.cancel()
    await asyncio.gather(lines, return_exceptions=True)
    await log.aclose()
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_an_owner_is_remembered_over_a_restart_of_the_service(world: ProcessHarness) -> None:
    async with service(world, lease_s=300):
        instance = await gateway(world, "a").start(world.make_spec("a1"))
    async with service(world, lease_s=300):
        assert json.loads((folder(world.data_dir) / "lease.json").read_text()) == "a"
        with pytest.raises(AgentRefusal, match="Another gateway owns this machine"):
            await gateway(world, "b").list()
        assert await gateway(world, "a").list() == [instance]


async def test_a_call_without_an_owner_changes_nothing(world: ProcessHarness) -> None:
    async with service(world, lease_s=300):
        instance = await gateway(world, "a").start(world.make_spec("a1"))
        with pytest.raises(AgentRefusal, match="the call names no gateway"):
            await gateway(world, "").stop("a1", 0)
        assert await gateway(world, "").list() == [instance]


def runs(pid: int, program: str) -> bool:
    return Path(program).samefile(f"/proc/{pid}/exe")


async def test_a_start_names_the_environment_and_the_weights_of_its_machine(
    world: ProcessHarness,
) -> None:
    def spec(name: str, model: str) -> LaunchSpec:
        new_spec = world.make_spec(name)
        python = f"{ENVIRONMENT}/bin/python"
        return new_spec.evolve(argv=(python, *new_spec.argv[1:], f"--model={model}"))

    async with service(world, lease_s=300):
        with pytest.raises(HostError, match="not at /absent on the machine one") as absent:
            await gateway(world, "a").start(spec("a1", "/absent"))
        assert "FITSERVE_MODELS_DIR" in absent.value.hint
        await answering(await gateway(world, "a").start(spec("a2", str(world.data_dir))))
        assert runs(world.pid("a2"), sys.executable)


def read_command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


async def test_a_machine_without_the_library_starts_its_engine_without_traces(
    world: ProcessHarness,
) -> None:
    flags = ("--enable-trace", f"--{ENDPOINT}=http://collector:4317")

    async def command_line(name: str) -> list[str]:
        spec = world.make_spec(name)
        traced_spec = spec.evolve(
            argv=(*spec.argv, *flags), env={**spec.env, SERVICE_VARIABLE: "vllm"}
        )
        await answering(await gateway(world, "a").start(traced_spec))
        return await asyncio.to_thread(read_command_line, world.pid(name))

    async with service(world, lease_s=300):
        assert set(flags).isdisjoint(await command_line("a1"))
        environment = engine_dir(world.data_dir, world.make_spec("a1").engine)
        (environment / "lib/python3.11/site-packages" / LIBRARY).mkdir(parents=True)
        assert set(flags) <= set(await command_line("a2"))


async def test_a_node_measures_a_network_for_its_gateway_alone(world: ProcessHarness) -> None:
    async with service(world, lease_s=300):
        with pytest.raises(AgentRefusal, match="names no gateway"):
            await gateway(world, "").final_answer(ListenCall(), hang_s())
        # This node has both ends, and measures one network at a time.
        with pytest.raises(HostError, match="measures another network now"):
            await measure_between(gateway(world, "a"), gateway(world, "a"))


async def test_two_nodes_measure_the_network_between_them(
    tmp_path: Path, anyio_backend: str
) -> None:
    worlds = [ProcessHarness(tmp_path / name) for name in ("one", "two")]
    async with service(worlds[0], lease_s=300), service(worlds[1], lease_s=300):
        network = await measure_between(*(gateway(world, "a") for world in worlds))
    assert network.tcp_bytes_s is not None
    assert network.latency_s is not None
    assert network.rdma is None


async def test_a_network_in_use_is_not_measured(
    world: ProcessHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter((0, 10**9))
    monkeypatch.setattr(network, "find_interface", lambda _: "eth0")
    monkeypatch.setattr(network, "traffic_bytes", lambda _: next(counts))
    async with service(world, lease_s=300):
        with pytest.raises(HostError, match="carries more than 4 MB/s now"):
            await gateway(world, "a").final_answer(ListenCall(), hang_s())
