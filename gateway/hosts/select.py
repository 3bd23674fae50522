"""Which host to use: Docker where its engine runs, else processes."""

from __future__ import annotations

import asyncio

from gateway.hosts.host import Host
from gateway.settings import Settings


async def choose_host(settings: Settings, instance: str) -> Host:
    """The host that the settings ask for. A Docker Engine that was asked for and is away is waited for, and /readyz says so; and so is
    one that is there and does not answer yet: engines of an earlier run may be in it, which must not get twins."""
    kind = settings.host_kind
    if kind in ("auto", "docker"):
        from gateway.hosts.docker.client import present
        from gateway.hosts.docker.host import DockerHost

        if kind == "docker" or await asyncio.to_thread(present):
            return DockerHost(network=settings.docker_network, instance=instance)
    if kind == "memory":
        from gateway.hosts.memory.host import MemoryHost

        return MemoryHost()
    from gateway.hosts.process.host import ProcessHost

    return ProcessHost(settings.data)
