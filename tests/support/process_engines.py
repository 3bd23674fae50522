"""Engines of a gateway that runs in the test, as processes: the one engine of
`tests/support/running.py`, installed, with a program of the test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gateway.domain import LaunchSpec
from gateway.hosts.process.host import ProcessHost
from tests.support.makers import engine
from tests.support.running import Running, running
from tests.support.scripted_engine import EngineScript


def _untouched_script(spec: LaunchSpec) -> EngineScript:
    raise AssertionError(f"{spec.name} is not a process")


@asynccontextmanager
async def running_processes(
    folder: Path, program: Sequence[str], **settings: Any
) -> AsyncIterator[Running]:
    """A gateway on `folder` whose engines are this program, with the arguments of their plans
    behind it; all of them end with the gateway."""
    environment = folder / "data/engines/vllm-cpu-99.0.0"
    (environment / "bin").mkdir(parents=True)
    # Nobody can ask it.
    (environment / "bin/python").symlink_to("/bin/false")
    (environment / ".complete").touch()
    new_engine = engine("cpu", "99.0.0", process_command=tuple(program))
    profile = folder / "own/engines/vllm-cpu/99.0.0.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text(new_engine.model_dump_json())
    host = ProcessHost(folder / "data")
    try:
        async with running(
            folder, _untouched_script, host=host, profiles_dir=folder / "own", **settings
        ) as gateway:
            yield gateway
    finally:
        for instance in await host.list():
            await host.stop(instance.name, 0)
