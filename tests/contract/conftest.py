"""The suite's one fixture: a harness per host. Docker's is made by `docker_harness()` in
`docker_harness.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

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


@pytest.fixture(params=["memory", "process", *_DOCKER])
async def harness(
    request: pytest.FixtureRequest, anyio_backend: str, tmp_path: Path
) -> AsyncIterator[Harness]:
    made = host_factory(request.param, tmp_path)
    try:
        yield made
    finally:
        await made.cleanup()
