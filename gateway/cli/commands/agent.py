"""`fitserve agent`: the process that alone reaches Docker, and starts engines for a gateway that
does not."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from pathlib import Path

from gateway.domain import Mount
from gateway.errors import SettingsError
from gateway.hosts.agent.agent_server import Agent
from gateway.hosts.agent.resolved_images import ResolvedImages
from gateway.hosts.docker.host import DockerHost
from gateway.logging import Logger
from gateway.profiles.profiles import Profiles
from gateway.settings import Settings
from gateway.store import atomic_file
from gateway.store.data_folder import hold

log = Logger("fitserve.agent")


def run(settings: Settings) -> None:
    """Until SIGTERM or SIGINT; engines go on running. Raises SettingsError."""
    held = _lock(settings.data)
    try:
        asyncio.run(_serve(settings))
    finally:
        os.close(held)


async def _serve(settings: Settings) -> None:
    profiles = Profiles(settings.profiles_dir)
    models = Mount(
        source=settings.models_source or str(settings.models), target=str(settings.models)
    )
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    host = DockerHost(settings.docker_network, _installation(settings.data))
    try:
        allowed, resolved = (
            profiles.allowed_images(settings.allowed_images),
            ResolvedImages(settings.data / "images.json"),
        )
        async with Agent(host, profiles.engine, models, allowed, resolved).serving(settings.agent):
            log.info(
                "listening",
                socket=str(settings.agent),
                models=models.source,
                network=settings.docker_network,
            )
            await ended.wait()
    finally:
        await host.close()


def _lock(data: Path) -> int:
    """Hold the data folder for this agent. Raises SettingsError."""
    try:
        return hold(data / "agent.lock")
    except BlockingIOError:
        raise SettingsError(
            f"Another agent uses the data folder {data}.",
            hint="Stop it, or set another FITSERVE_DATA_DIR.",
        ) from None


def _installation(data: Path) -> str:
    """The id that marks the engines of this agent. A gateway cannot name another one. Raises
    SettingsError."""
    file = data / "installation"
    try:
        if not file.exists():
            atomic_file.write(file, secrets.token_hex(6).encode())
        return file.read_text().strip()
    except OSError as error:
        raise SettingsError(
            f"The file {file}, which tells whose engines are whose, cannot be used:"
            f" {error.strerror}.",
            hint="Set FITSERVE_DATA_DIR to a folder you can write.",
        ) from None
