"""Engine images in Docker on this machine: found, allowed, or pulled."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from gateway.domain import EngineRef
from gateway.domain.image_name import AllowedImages, is_digest_of
from gateway.errors import HostError
from gateway.hosts.docker.client import DockerClient
from gateway.hosts.docker.container import Attributes, image_of
from gateway.hosts.docker.stream import DockerRefusalError, PullProgress, stream

if TYPE_CHECKING:
    from docker.api import APIClient

# A pull is silent while it verifies a layer of gigabytes.
_PULL_SILENCE_S = 600.0


class LocalImages:
    """Finds and pulls engine images in Docker on this machine.

    `allowed_images` are images that may be started or asked; None: the caller has checked.
    """

    def __init__(self, docker: DockerClient, allowed_images: AllowedImages | None) -> None:
        self._docker = docker
        self._allowed_images = allowed_images

    def name_of(self, engine: EngineRef) -> str:
        """The name of the image of `image_of`. Raises HostError for an image that may not be
        started."""
        name = engine.image or ""
        is_tagged = engine.digest is None or is_digest_of(engine.digest, name)
        if (
            name
            and self._allowed_images is not None
            and not (is_tagged and self._allowed_images.allows(name))
        ):
            message, hint = self._allowed_images.refusal(name)
            raise HostError(message, hint=hint)
        return image_of(engine)

    async def inspect(self, engine: EngineRef) -> Attributes:
        """The inspected image. Raises HostError if it is not here."""
        image = await self._docker.call(partial(_image, self.name_of(engine)))
        if image is None:
            if engine.digest is not None:
                raise _missing_image_error(engine)
            raise HostError(
                f"The image {engine.image} is not on this machine yet.",
                hint=f"Pull it: `docker pull {engine.image}`.",
            )
        return image

    async def pull(self, engine: EngineRef, report: Callable[[str], None]) -> None:
        """Pull the image of an engine if it is not here. Raises HostError."""
        image = self.name_of(engine)
        if await self._docker.call(partial(_has_image, image)):
            return
        if image.startswith("sha256:"):
            raise _missing_image_error(engine)
        progress = PullProgress(image)
        try:
            await self._pull(image, progress, report)
        except TimeoutError:
            progress.error = f"no data came for {_PULL_SILENCE_S:.0f} s"
        except (DockerRefusalError, OSError) as error:
            progress.error = str(error)
        if progress.error is None and not await self._docker.call(partial(_has_image, image)):
            progress.error = "Docker closed the connection"
        if progress.error is not None:
            raise HostError(
                f"The image {image} is not on this machine and could not be pulled:"
                f" {progress.error.rstrip('.')}.",
                hint=image_hint(image),
            )

    async def _pull(
        self, image: str, progress: PullProgress, report: Callable[[str], None]
    ) -> None:
        """Pull an image. Raises DockerRefusalError, OSError."""
        report(progress.describe())
        reported_at = time.monotonic()
        request, headers = await self._docker.call(partial(_pull_request, image))
        answer = stream(
            self._docker.path,
            request,
            headers=headers,
            head_s=_PULL_SILENCE_S,
            silence_s=_PULL_SILENCE_S,
        )
        async with aclosing(answer) as chunks:
            async for chunk in chunks:
                progress.feed(chunk)
                if time.monotonic() >= reported_at + 1:
                    report(progress.describe())
                    reported_at = time.monotonic()


def _image(image: str, client: APIClient) -> Attributes | None:
    from docker.errors import NotFound

    try:
        attributes: Attributes = client.inspect_image(image)  # type: ignore[no-untyped-call]
    except NotFound:
        return None
    return attributes


def _missing_image_error(engine: EngineRef) -> HostError:
    return HostError(
        f"The image of {engine} from its first start or question, {engine.digest}, is no longer"
        " on this machine.",
        hint=(
            f"`fitserve retry NAME` takes what {engine.image} is now; `docker load` brings the old"
            " one back."
        ),
    )


def image_hint(image: str) -> str:
    if image.startswith("fitserve/"):
        return (
            "It is built, not pulled: run `docker compose build engine-cpu` in a checkout of"
            " fitserve, or set FITSERVE_HOST_KIND=process for an engine of `fitserve engine"
            " install`."
        )
    return (
        "Check its name, the network and `docker login`, or bring it here with `docker pull"
        f" {image}`, `docker load` or `docker build`."
    )


def _has_image(image: str, client: APIClient) -> bool:
    return _image(image, client) is not None


def _pull_request(image: str, client: APIClient) -> tuple[str, str]:
    """The pull request and its headers, with the `docker login` of the registry, if any."""
    from docker.auth import get_config_header, resolve_repository_name
    from docker.utils import parse_repository_tag

    repository, tag = parse_repository_tag(image)
    login = get_config_header(client, resolve_repository_name(repository)[0])
    query = urlencode({"fromImage": repository, "tag": tag or "latest"})
    return (
        f"POST /v{client.api_version}/images/create?{query}",
        f"X-Registry-Auth: {login.decode()}\r\n" if login else "",
    )
