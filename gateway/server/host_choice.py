"""Choice of the host for engines: Docker if it runs, otherwise processes of this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gateway.domain.image_name import AllowedImages
from gateway.hosts.host import Host
from gateway.logging import Logger
from gateway.settings import Settings

log = Logger("fitserve")


async def choose_host(settings: Settings, instance: str, allowed_images: AllowedImages) -> Host:
    """The host that the settings select. `allowed_images`: the images that may be started; an agent
    has its own list.

    Docker is chosen even while it does not answer. Docker's containers may be engines of an earlier
    run, and a process would start a second copy. The loop then waits for Docker, and /readyz names
    the problem. Processes of an earlier run, as those of `fitserve demo`, are adopted for the same
    reason.
    """
    kind = settings.host_kind
    if kind == "agent":
        from gateway.hosts.agent.host import AgentHost

        return AgentHost(settings.agent)
    if kind == "cluster":
        from gateway.hosts.cluster.gateway_side import host_of_cluster

        return await host_of_cluster(settings.data, instance)
    if kind in ("auto", "docker"):
        from gateway.hosts.docker.client import is_listening
        from gateway.hosts.docker.host import DockerHost

        if kind == "docker" or (
            not await asyncio.to_thread(_runs_processes, settings.data)
            and await asyncio.to_thread(is_listening)
        ):
            return DockerHost(
                network=settings.docker_network, instance=instance, allowed_images=allowed_images
            )
    from gateway.hosts.process.host import ProcessHost

    return ProcessHost(settings.data, settings.prepared_engines)


def _runs_processes(data: Path) -> bool:
    """Whether engines of an earlier run are processes. Without a readable record none is known."""
    from gateway.hosts.process.instance_records import runs_engine

    try:
        is_running = runs_engine(data)
    except OSError:
        return False
    if is_running:
        log.info("engines of an earlier run are processes, so Docker is not used")
    return is_running
