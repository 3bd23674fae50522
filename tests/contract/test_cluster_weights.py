"""Weights of two machines with real Ray, copied from relay to relay through deaths of programs."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator

import pytest

from gateway.errors import AgentAway, FitserveError
from gateway.hosts.host import HubCommit
from gateway.models.catalog.hub_cache import HubCache
from tests.support.hub_commits import COMMIT, REPO, disk_of, put_commit

from .cluster_harness import ClusterHarness
from .harness import until

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


async def copy_to_second_node(cluster: ClusterHarness) -> None:
    spec = cluster.make_spec("a1").evolve(node="two")
    await cluster.host.copy_weights(spec, [WANTED], lambda _: None)


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

    copying = asyncio.ensure_future(copy_to_second_node(cluster))
    while not copied_bytes():
        # On a busy machine the first calls may take too long: they start the actors.
        if copying.done():
            assert isinstance(copying.exception(), AgentAway)
            copying = asyncio.ensure_future(copy_to_second_node(cluster))
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
        await copy_to_second_node(cluster)
    except FitserveError:
        return False
    return True
