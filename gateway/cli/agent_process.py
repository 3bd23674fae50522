"""`fitserve agent`: starts engines in Docker for a gateway without access to Docker."""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path

from gateway.domain import Mount
from gateway.errors import SettingsError
from gateway.hosts.agent.agent_server import Agent, stop_event
from gateway.hosts.agent.resolved_images import ResolvedImages
from gateway.hosts.docker.host import DockerHost
from gateway.logging import Logger
from gateway.profiles.profiles import Profiles
from gateway.settings import Settings
from gateway.store import atomic_file
from gateway.store.data_folder import lock_exclusively

log = Logger("fitserve.agent")


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Engines keep running. Raises SettingsError."""
    lock_fd = lock_exclusively(settings.data / "agent.lock", "agent")
    try:
        asyncio.run(_serve(settings))
    finally:
        os.close(lock_fd)


async def _serve(settings: Settings) -> None:
    profiles = Profiles(settings.profiles_dir)
    models = Mount(
        source=settings.shared_models or str(settings.models), target=str(settings.models)
    )
    stop = stop_event()
    host = DockerHost(settings.docker_network, _installation_id(settings.data))
    try:
        allowed_images = profiles.allowed_images(settings.allowed_images)
        resolved_images = ResolvedImages(settings.data / "images.json")
        agent = Agent(
            host,
            profiles.engine,
            models,
            allowed_images,
            resolved_images,
            trace_endpoint=settings.engine_otlp_endpoint,
        )
        async with agent.serving(settings.agent):
            log.info(
                "listening",
                socket=str(settings.agent),
                models=models.source,
                network=settings.docker_network,
            )
            await stop.wait()
    finally:
        await host.close()


def _installation_id(data: Path) -> str:
    """The id on the labels of this agent's engines. A gateway cannot choose another id. Raises
    SettingsError."""
    file = data / "installation"
    try:
        if not file.exists():
            atomic_file.write(file, secrets.token_hex(6).encode())
        return file.read_text().strip()
    except OSError as error:
        raise SettingsError(
            f"The file {file} with the id of this installation cannot be used: {error.strerror}.",
            hint="Set FITSERVE_DATA_DIR to a writable folder.",
        ) from None
