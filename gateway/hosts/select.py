"""Which host to use: Docker where its engine answers, else processes."""

from __future__ import annotations

import asyncio

from gateway.errors import HostError
from gateway.hosts.host import Host
from gateway.settings import Settings


async def choose_host(settings: Settings, instance: str) -> Host:
    """The host that the settings ask for. Raises HostError when Docker was asked for and does not answer."""
    kind = settings.host_kind
    if kind in ("auto", "docker"):
        from gateway.hosts.docker import DockerHost, available

        if await asyncio.to_thread(available):
            return DockerHost(network=settings.docker_network, instance=instance)
        if kind == "docker":
            raise HostError(
                "FITSERVE_HOST_KIND is docker, and no Docker Engine answers.",
                hint="Start Docker and see that this user may reach its socket; `fitserve doctor` checks both.",
            )
    if kind == "memory":
        from gateway.hosts.memory import MemoryHost

        return MemoryHost()
    from gateway.hosts.process import ProcessHost

    return ProcessHost(settings.data)
