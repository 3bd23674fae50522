"""The suite's one fixture: a harness per host. Docker's is made by `docker_harness()` in
`docker_harness.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from .cluster_harness import ClusterHarness, LinkedNodes, cluster_for_test, linked_nodes
from .harness import Harness


def host_factory(kind: str, tmp_path: Path) -> Harness:
    if kind == "memory":
        from .memory_harness import MemoryHarness

        return MemoryHarness()
    if kind == "process":
        from .process_harness import ProcessHarness

        return ProcessHarness(tmp_path)
    if kind == "agent":
        from .agent_harness import agent_harness

        return agent_harness(tmp_path)
    from .docker_harness import docker_harness

    return docker_harness()


_DOCKER = [pytest.param(kind, marks=pytest.mark.docker) for kind in ("docker", "agent")]


@pytest.fixture(scope="session")
def machines() -> Iterator[LinkedNodes]:
    """The cluster of all tests, as its start takes ten seconds."""
    nodes = linked_nodes()
    try:
        nodes.start()
        yield nodes
    finally:
        leftovers = nodes.close()
    assert leftovers == [], "programs of the cluster outlived it"


@pytest.fixture
async def cluster(machines: LinkedNodes, anyio_backend: str) -> AsyncIterator[ClusterHarness]:
    async with cluster_for_test(machines) as cluster_harness:
        yield cluster_harness


@pytest.fixture(params=["memory", "process", "cluster", *_DOCKER])
async def harness(
    request: pytest.FixtureRequest, anyio_backend: str, tmp_path: Path
) -> AsyncIterator[Harness]:
    if request.param == "cluster":
        async with cluster_for_test(request.getfixturevalue("machines")) as cluster:
            yield cluster
        return
    agent_or_host = host_factory(request.param, tmp_path)
    try:
        yield agent_or_host
    finally:
        await agent_or_host.cleanup()
