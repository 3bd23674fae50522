"""Machines of a cluster that come and go: real Ray, two machines, and engines that outlive all."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import pytest

from gateway.domain import Instance
from gateway.errors import AgentAway
from gateway.hosts.cluster.host import node_states
from tests.support.cluster_nodes import has_words
from tests.support.listening import listening_addresses
from tests.support.patience import hang_s

from .cluster_harness import ClusterHarness
from .harness import answering, find, get, request, until

pytestmark = pytest.mark.anyio


async def one_engine_each(cluster: ClusterHarness) -> dict[str, Instance]:
    """Running engines by machine."""
    instances = [await cluster.host.start(cluster.make_spec(name)) for name in ("a1", "a2")]
    for instance in instances:
        await answering(instance)
        await cluster.host.list()
    return {instance.node: instance for instance in instances}


async def test_engines_are_spread_and_listen_on_the_address_of_their_machine(
    cluster: ClusterHarness,
) -> None:
    by_node = await one_engine_each(cluster)
    assert set(by_node) == {"one", "two"}
    for node in cluster.nodes.nodes:
        instance = by_node[node.name]
        assert instance.url is not None
        assert instance.url.startswith(f"http://{node.address}:")
        assert cluster.pid(instance.name) in node.pids("fake_engine")


async def test_an_engine_answers_other_machines_only_with_its_key(
    cluster: ClusterHarness,
) -> None:
    spec = cluster.make_spec("a1").evolve(node="two", key_env="VLLM_API_KEY")
    instance = await cluster.host.start(spec)
    await answering(instance)
    pids = cluster.nodes.second.pids("fake_engine")
    assert set.union(*map(listening_addresses, pids)) == {cluster.nodes.second.address}
    assert instance.key is not None
    key = instance.key.reveal()
    assert [await status(instance, line) for line in (None, "wrong", key)] == [401, 401, 200]
    for node in cluster.nodes.nodes:
        for pid in node.pids():
            assert not has_words(pid, (key,)), "a command line shows the key"


async def status(instance: Instance, key: str | None) -> int:
    """The status of an answer to a caller with this key."""
    line = f"authorization: Bearer {key}\r\n" if key is not None else ""
    head = f"GET /v1/models HTTP/1.1\r\nhost: engine\r\nconnection: close\r\n{line}\r\n"
    return (await request(instance, head.encode()))[0]


def variables(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_bytes().decode()
    return dict(item.partition("=")[::2] for item in text.split("\0") if item)


def oom_score(pid: int) -> str:
    return Path(f"/proc/{pid}/oom_score_adj").read_text()


def parents(pid: int) -> list[int]:
    pids = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        pids.append(pid)
    return pids


async def test_an_engine_inherits_nothing_of_ray(cluster: ClusterHarness) -> None:
    by_node = await one_engine_each(cluster)
    token = (cluster.nodes.head.data / "cluster/token").read_text()
    for node in cluster.nodes.nodes:
        pid = cluster.pid(by_node[node.name].name)
        assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0)
        assert oom_score(pid) == oom_score(os.getpid())
        names = variables(pid)
        assert not [name for name in names if name.startswith("RAY_") or "OMP" in name]
        rays = {*node.pids("raylet"), *node.pids("ray::"), *node.pids("ray.scripts")}
        assert rays
        assert not rays & set(parents(pid))
        for program in node.pids():
            assert not has_words(program, (token,))
            with suppress(OSError):
                assert token not in variables(program).values()


@pytest.mark.parametrize(
    ("machine", "program"),
    [
        ("two", "ray::Relay"),
        ("two", "raylet/raylet"),
        ("two", "ray.scripts.scripts"),
        ("two", "cluster node"),
        ("two", "cluster join"),
        ("one", "hosts.cluster.link"),
        ("one", "gcs_server"),
    ],
)
async def test_engines_outlive_a_killed_program_and_are_listed_again(
    cluster: ClusterHarness, machine: str, program: str
) -> None:
    by_node = await one_engine_each(cluster)
    pids = {name: cluster.pid(name) for name in ("a1", "a2")}
    node = next(node for node in cluster.nodes.nodes if node.name == machine)
    pids_before = node.kill(program)
    if program == "cluster join":
        assert node.supervisor is not None
        node.supervisor.wait(hang_s())
        node.start()

    async def is_replaced() -> bool:
        await asyncio.to_thread(cluster.nodes.connect)
        return bool(pids := node.pids(program)) and not set(pids) & set(pids_before)

    if program != "ray::Relay":
        # The link makes an actor at its next call.
        await until(f"another {program} runs", is_replaced)
    await cluster.join()
    instances = {instance.node: instance for instance in await cluster.host.list()}
    assert {name: instance.state for name, instance in instances.items()} == {
        "one": "running",
        "two": "running",
    }
    assert instances == by_node
    assert {name: cluster.pid(name) for name in pids} == pids
    for instance in by_node.values():
        assert (await get(instance, "/health"))[0] == 200


async def test_a_machine_without_network_is_lost_and_comes_back_with_its_engine(
    cluster: ClusterHarness,
) -> None:
    by_node = await one_engine_each(cluster)
    cluster.nodes.part(cluster.nodes.second, parted=True)
    try:

        async def is_lost() -> bool:
            return [instance.node for instance in await cluster.host.list()] == ["one"]

        await until("the machine is lost", is_lost)
        assert (await node_states(cluster.nodes.link)).keys() == {"one"}
        with pytest.raises(AgentAway, match="The machine two is not in the cluster"):
            await cluster.host.node("two").list()
        instance = await cluster.host.start(cluster.make_spec("a3"))
        assert instance.node == "one"
        # Another machine runs its engine by now.
        twin = by_node["two"].name
        await answering(await cluster.restart().start(cluster.make_spec(twin)))
    finally:
        cluster.nodes.part(cluster.nodes.second, parted=False)
    await cluster.join()

    async def single() -> bool:
        await cluster.host.list()
        return cluster.members(twin) == 1

    await until("one of the twins is stopped", single)
    assert (await find(cluster.host, twin) or instance).node == "one"


async def test_a_drained_machine_starts_nothing_until_it_is_undone(
    cluster: ClusterHarness,
) -> None:
    def fitserve(*arguments: str) -> str:
        result = cluster.nodes.head.fitserve("cluster", *arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout

    by_node = await one_engine_each(cluster)
    result = await asyncio.to_thread(fitserve, "drain", "two")
    assert "two starts no engines. Running engines: 1." in result
    status = await asyncio.to_thread(fitserve, "status")
    rows = {line.split()[0]: line.split()[1:3] for line in status.splitlines()}
    assert rows["one"] == ["ready", cluster.nodes.head.address]
    assert rows["two"] == ["drained", cluster.nodes.second.address]
    starts = [await cluster.host.start(cluster.make_spec(name)) for name in ("a3", "a4")]
    assert [start.node for start in starts] == ["one", "one"]
    assert (await find(cluster.host, by_node["two"].name)) == by_node["two"]
    await asyncio.to_thread(fitserve, "drain", "two", "--undo")
    assert (await cluster.host.start(cluster.make_spec("a5"))).node == "two"


async def test_a_machine_leaves_without_engines_and_joins_again(cluster: ClusterHarness) -> None:
    by_node = await one_engine_each(cluster)
    second_node = cluster.nodes.second
    refusal = await asyncio.to_thread(second_node.fitserve, "cluster", "leave")
    assert refusal.returncode != 0
    assert f"Engines run on two: {by_node['two'].name}" in refusal.stderr
    await cluster.host.stop(by_node["two"].name, 0)
    result = await asyncio.to_thread(second_node.fitserve, "cluster", "leave")
    assert result.returncode == 0, result.stderr
    assert second_node.supervisor is not None
    assert second_node.supervisor.wait(hang_s()) == 0

    async def is_empty() -> bool:
        return second_node.pids() == []

    # Programs of Ray end by themselves after the raylet.
    await until("no program of the machine is left", is_empty)

    async def is_gone() -> bool:
        return set(await node_states(cluster.nodes.link)) == {"one"}

    await until("the machine has left", is_gone)
    second_node.start()
    await cluster.join()
    assert (await cluster.host.start(cluster.make_spec("a3"))).node == "two"


async def test_a_wrong_token_and_an_absent_head_are_named(cluster: ClusterHarness) -> None:
    second_node = cluster.nodes.second
    token = cluster.nodes.folder / "wrong-token"
    token.write_text("f" * 64)
    token.chmod(0o600)
    head = f"{cluster.nodes.head.address}:6379"
    environment = {"FITSERVE_DATA_DIR": str(cluster.nodes.folder / "stranger")}
    arguments = ("--address", second_node.address, "--token-file", str(token))
    refusal = await asyncio.to_thread(
        lambda: second_node.fitserve("cluster", "join", head, *arguments, settings=environment)
    )
    assert refusal.returncode != 0
    assert f"The token in {token} is not that of the cluster at {head}." in refusal.stderr
    assert "scp -p" in refusal.stderr
    assert not (cluster.nodes.folder / "stranger/cluster/membership.json").exists()
    token.write_text("short")
    refusal = await asyncio.to_thread(
        lambda: second_node.fitserve("cluster", "join", head, *arguments, settings=environment)
    )
    assert "has 5 bytes; 32 are the least" in refusal.stderr
