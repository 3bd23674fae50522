"""Asking the engines of this machine from the command line: those that the gateway of these
settings would start."""

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

# Marks the containers of inquiries: the gateway's carry the id of its installation.
_OWNER = "cli"


def inquirer(*, image: str | None = None, python: Path | None = None) -> Inquirer:
    """image: the engine is asked in a container, whatever the settings say; python: it is asked
    there."""
    settings = load_settings()
    return Inquirer(host_of(settings, image, python), AnswerCache(settings.data / "answers"))


def allowed_images() -> AllowedImages | None:
    """Those that may be started; None where engines are processes."""
    settings = load_settings()
    if settings.host_kind == "process":
        return None
    return Profiles(settings.profiles_dir).allowed_images(settings.allowed_images)


def host_of(settings: Settings, image: str | None = None, python: Path | None = None) -> AskedHost:
    """The host of the engines that are asked."""
    from gateway.hosts.process.asked_environment import OnePython
    from gateway.hosts.process.host import ProcessHost

    kind = settings.host_kind
    if python is not None:
        return OnePython(python, settings.data / "asking")
    if kind == "agent":
        from gateway.hosts.agent.host import AgentHost

        return AgentHost(settings.agent)
    if kind == "process" and image is None:
        return ProcessHost(settings.data)
    from gateway.hosts.docker.client import listening
    from gateway.hosts.docker.host import DockerHost

    if kind == "docker" or image is not None:
        return DockerHost(settings.docker_network, _OWNER, allowed=allowed_images())
    process = ProcessHost(settings.data)
    docker = DockerHost(settings.docker_network, _OWNER, allowed=allowed_images())
    return _FirstThatHas((docker, process)) if listening() else process


class _FirstThatHas:
    """Several hosts as one: whichever has the engine is asked. What no gateway has started yet may
    be here in either form."""

    def __init__(self, hosts: Sequence[AskedHost]) -> None:
        self._hosts = hosts

    async def resolve(self, engine: EngineRef) -> EngineRef:
        return await (await self._found(engine))[0].resolve(engine)

    async def identity(self, engine: EngineRef) -> str:
        return (await self._found(engine))[1]

    async def inquire(
        self, engine: EngineRef, asked: bytes, gpus: tuple[str, ...] = ()
    ) -> AsyncGenerator[bytes, None]:
        from contextlib import aclosing

        async with aclosing((await self._found(engine))[0].inquire(engine, asked, gpus)) as lines:
            async for line in lines:
                yield line

    async def _found(self, engine: EngineRef) -> tuple[AskedHost, str]:
        problems: list[HostError] = []
        for host in self._hosts:
            try:
                return host, await host.identity(engine)
            except HostError as error:
                problems.append(error)
        raise HostError(
            " ".join(one.message for one in problems),
            hint=" Or: ".join(one.hint for one in problems),
        )
