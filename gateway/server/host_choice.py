"""Which host runs the engines: Docker where its engine runs, else processes of this machine."""

from __future__ import annotations

import asyncio

from gateway.domain.image_name import AllowedImages
from gateway.hosts.host import Host
from gateway.settings import Settings


async def choose_host(settings: Settings, instance: str, allowed: AllowedImages) -> Host:
    """The host that the settings ask for. allowed: the images that may be started; an agent has its
    own word on that.

    Docker is chosen also while it does not answer: its containers may be engines of an earlier run,
    and an engine started as a process would be a second copy of such an engine. The loop then waits
    for Docker, and /readyz names the problem.
    """
    kind = settings.host_kind
    if kind == "agent":
        from gateway.hosts.agent.host import AgentHost

        return AgentHost(settings.agent)
    if kind in ("auto", "docker"):
        from gateway.hosts.docker.client import listening
        from gateway.hosts.docker.host import DockerHost

        if kind == "docker" or await asyncio.to_thread(listening):
            return DockerHost(network=settings.docker_network, instance=instance, allowed=allowed)
    from gateway.hosts.process.host import ProcessHost

    return ProcessHost(settings.data)
