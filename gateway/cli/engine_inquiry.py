"""Inquiries to the engines of this machine that a gateway with these settings would start."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from gateway.domain import EngineRef
from gateway.domain.image_name import AllowedImages
from gateway.engines.inquiry.answer_cache import AnswerCache
from gateway.engines.inquiry.inquirer import AskedHost, Inquirer
from gateway.errors import HostError
from gateway.profiles.profiles import Profiles
from gateway.settings import Settings, load_settings

# Label on the containers of inquiries; the gateway's own carry the id of its installation.
_OWNER = "cli"


def inquirer(*, image: str | None = None, python: Path | None = None) -> Inquirer:
    """The inquirer for a container of `image`, for an environment with `python`, or as set."""
    settings = load_settings()
    return Inquirer(inquiry_host(settings, image, python), AnswerCache(settings.data / "answers"))


def allowed_images() -> AllowedImages | None:
    """The images that may be started. None where engines are processes."""
    settings = load_settings()
    if settings.runs_processes:
        return None
    profiles = Profiles(settings.profiles_dir, data=settings.data)
    return profiles.allowed_images(settings.allowed_images)


def inquiry_host(
    settings: Settings, image: str | None = None, python: Path | None = None
) -> AskedHost:
    """The host of the engines for inquiries."""
    from gateway.hosts.process.asked_environment import SinglePythonHost
    from gateway.hosts.process.host import ProcessHost

    kind = settings.host_kind
    if python is not None:
        return SinglePythonHost(python, settings.data / "asking")
    if kind == "agent":
        from gateway.hosts.agent.host import AgentHost

        return AgentHost(settings.agent)
    if kind in ("process", "cluster") and image is None:
        return ProcessHost(settings.data)
    from gateway.hosts.docker.client import is_listening
    from gateway.hosts.docker.host import DockerHost

    if kind == "docker" or image is not None:
        return DockerHost(settings.docker_network, _OWNER, allowed_images=allowed_images())
    process = ProcessHost(settings.data)
    docker = DockerHost(settings.docker_network, _OWNER, allowed_images=allowed_images())
    return _FirstHostWithEngine((docker, process)) if is_listening() else process


class _FirstHostWithEngine:
    """Several hosts as one: the first that has the engine is asked."""

    def __init__(self, hosts: Sequence[AskedHost]) -> None:
        self._hosts = hosts

    async def resolve(self, engine: EngineRef) -> EngineRef:
        return await (await self._host_and_identity(engine))[0].resolve(engine)

    async def identity(self, engine: EngineRef) -> str:
        return (await self._host_and_identity(engine))[1]

    async def run_inquiry(
        self, engine: EngineRef, question: bytes, gpus: tuple[str, ...] = ()
    ) -> AsyncGenerator[bytes, None]:
        from contextlib import aclosing

        async with aclosing(
            (await self._host_and_identity(engine))[0].run_inquiry(engine, question, gpus)
        ) as lines:
            async for line in lines:
                yield line

    async def _host_and_identity(self, engine: EngineRef) -> tuple[AskedHost, str]:
        problems: list[HostError] = []
        for host in self._hosts:
            try:
                return host, await host.identity(engine)
            except HostError as error:
                problems.append(error)
        raise HostError(
            " ".join(problem.message for problem in problems),
            hint=" Or: ".join(problem.hint for problem in problems),
        )
