"""Engines as containers of the Docker Engine on this machine.

This host adds to the contract:

* The container of NAME is called `fitserve-INSTALLATION-NAME`. Labels with our installation and
  NAME mark it as ours.
* No port is published. Engines share one internal network. This machine, and a gateway container on
  that network, reach them at the container's address, which lasts as long as the container runs.
  Engines reach each other and this machine. Traffic to farther addresses is dropped silently.
* The log is a part of the container and goes with it: read it before `stop`.
* Another fingerprint under the same name is a Conflict, running or not.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

from gateway.domain import (
    EngineProcess,
    EngineRef,
    Instance,
    LaunchSpec,
    PreparedView,
    StartConditions,
)
from gateway.domain.image_name import AllowedImages
from gateway.engines.inquiry import script
from gateway.engines.inquiry.output import InquiryOutput
from gateway.errors import Conflict, ForeignInstance, HostError
from gateway.hosts.docker.cache_volumes import has_volume
from gateway.hosts.docker.client import DockerClient, is_available, socket_path
from gateway.hosts.docker.container import (
    RUNNING_STATES,
    Attributes,
    build_instance,
    container_name,
    create,
    read_digest,
    running_instance,
    start_error,
)
from gateway.hosts.docker.inquiry import create_inquiry, remove_lost_inquiries, start_inquiry
from gateway.hosts.docker.local_images import LocalImages
from gateway.hosts.docker.network import ambiguous_network, ensure_network
from gateway.hosts.docker.stream import (
    CHUNK,
    DockerRefusalError,
    LogLines,
    conversation,
    stream,
    whole_frames,
)
from gateway.hosts.host import MAX_COMMAND, Machines

if TYPE_CHECKING:
    from docker.api import APIClient

__all__ = ["DockerHost", "is_available"]

# Inside the class `list` is the method.
Instances = list[Instance]

# Every container has its own network address, so all engines may listen on the same port.
ENGINE_PORT = 8000
# A start waits for the GPU driver, seconds per GPU if nothing keeps it loaded; removal waits for
# the disk.
_SLOW_CALL_TIMEOUT_S = 60.0
_RETRY_S = 0.1


class DockerHost:
    """See the module's docstring and `Host`.

    instance: the id of this installation.
    allowed_images: images that may be started or inquired; None: the caller has checked.
    """

    kind: str = "docker"
    can_fork = False
    machines: Machines | None = None

    def __init__(
        self,
        network: str,
        instance: str,
        base_url: str | None = None,
        *,
        timeout_s: float = 10,
        allowed_images: AllowedImages | None = None,
    ) -> None:
        self._network = network
        self._owner = instance
        self._docker = DockerClient(socket_path(base_url), timeout_s)
        self._images = LocalImages(self._docker, allowed_images)

    async def prepare(self, engine: EngineRef, report: Callable[[str], None]) -> None:
        await self._images.pull(engine, report)

    async def prepare_fork(self, spec: LaunchSpec) -> None:
        """Containers are not forked."""

    async def start(self, spec: LaunchSpec) -> Instance:
        self._images.name_of(spec.engine)
        return await self._docker.call(partial(self._start_container, spec), _SLOW_CALL_TIMEOUT_S)

    async def list(self) -> list[Instance]:
        return await self._docker.call(self._list_containers)

    async def stop(self, name: str, grace_s: float) -> None:
        attributes = await self._docker.call(partial(self._find_container, name))
        if attributes is None:
            return
        container = attributes["Id"]
        if attributes["State"]["Status"] in RUNNING_STATES:
            await self._docker.call(partial(_terminate_container, container))
            deadline = time.monotonic() + grace_s
            pause = 0.05
            while (left_s := deadline - time.monotonic()) > 0 and await self._docker.call(
                partial(_is_running, container)
            ):
                await asyncio.sleep(min(pause, left_s))
                pause = min(pause * 1.5, 0.5)
        await self._docker.call(partial(_remove_container, container), _SLOW_CALL_TIMEOUT_S)

    async def processes(self, name: str) -> tuple[EngineProcess, ...]:
        container = await self._docker.call(partial(self._find_container, name))
        if container is None or container["State"]["Status"] not in RUNNING_STATES:
            return ()
        return await self._docker.call(
            partial(_processes, container["Id"], container["State"]["Status"] == "paused")
        )

    async def conditions(self, engine: EngineRef, cache: str) -> StartConditions:
        image = await self._images.inspect(engine)
        has_cache = await self._docker.call(partial(has_volume, image, cache, self._owner))
        return StartConditions(origin="container", is_cache_empty=not (cache and has_cache))

    async def prepared_views(self) -> tuple[PreparedView, ...]:
        return ()

    async def follow(self, name: str) -> AsyncGenerator[bytes, None]:
        """The lines of an engine's log from its begin, until the engine ends."""
        attributes = await self._docker.call(partial(self._find_container, name))
        if attributes is None:
            return
        container = attributes["Id"]
        lines = LogLines()
        while True:
            # The state is read before the log: a log read after the exit is complete, a followed
            # log may lack its end. So there are two passes or more. A broken pass is repeated, also
            # for long while Docker restarts.
            try:
                version, is_running = await self._docker.call(partial(_docker_facts, container))
                query = "stdout=1&stderr=1&timestamps=1"
                query += f"&since={lines.resume()}&follow={int(is_running)}"
                request = f"GET /v{version}/containers/{container}/logs?{query}"
                async with aclosing(
                    stream(self._docker.path, request, head_s=self._docker.timeout_s)
                ) as chunks:
                    async for chunk in chunks:
                        for line in lines.feed(chunk):
                            yield line
            except DockerRefusalError as refusal:
                if refusal.status not in (404, 409):
                    raise HostError(
                        f"Docker refuses to give the log of {name}: {refusal}.",
                        hint=f"Check that Docker can read it: `docker logs {name}`.",
                    ) from refusal
                break
            except (HostError, OSError):
                await asyncio.sleep(1)
                continue
            if not is_running:
                break
            await asyncio.sleep(0.1)
        for line in lines.rest():
            yield line

    async def allocate_port(self) -> int:
        return ENGINE_PORT

    async def resolve(self, engine: EngineRef) -> EngineRef:
        image = await self._images.inspect(engine)
        return engine.evolve(digest=engine.digest or read_digest(image, engine.image or ""))

    async def identity(self, engine: EngineRef) -> str:
        return str((await self._images.inspect(engine))["Id"])

    async def run_inquiry(
        self, engine: EngineRef, document: bytes, gpus: tuple[str, ...] = ()
    ) -> AsyncGenerator[bytes, None]:
        """Run the inquiry program in a container of the engine's image, and yield its answers."""
        image = self._images.name_of(engine)
        output = InquiryOutput()
        container, version = await self._docker.call(
            partial(_make_inquiry, image, self._owner, gpus), _SLOW_CALL_TIMEOUT_S
        )
        path = self._docker.path
        endpoint = f"POST /v{version}/containers/{container}"
        attach = f"{endpoint}/attach?stream=1&stdin=1&stdout=1&stderr=1"
        try:
            async with (
                conversation(path, attach, head_s=self._docker.timeout_s) as (
                    output_reader,
                    input_writer,
                ),
                conversation(
                    path, f"{endpoint}/wait?condition=next-exit", head_s=self._docker.timeout_s
                ) as (ended_reader, _),
            ):
                await self._docker.call(
                    partial(_start_inquiry, container, image), _SLOW_CALL_TIMEOUT_S
                )
                # The input is written while output is read.
                input_writer.write(script.input_bytes(document))
                frames = bytearray()
                while chunk := await output_reader.read(CHUNK):
                    frames += chunk
                    for source, text in whole_frames(frames):
                        if source == 2:
                            output.add_error_output(text)
                            continue
                        for line in output.add_output(text):
                            yield line
                if code := int(json.loads(await ended_reader.read())["StatusCode"]):
                    raise output.exit_error(code)
        except (DockerRefusalError, OSError, ValueError, KeyError) as error:
            raise HostError(
                f"Docker broke off the answer of {engine}: {error}.",
                hint="No action is needed: fitserve plans by its own rules.",
            ) from error
        finally:
            await asyncio.shield(
                self._docker.call(partial(_remove_container, container), _SLOW_CALL_TIMEOUT_S)
            )

    async def stop_command(self, names: Sequence[str]) -> Sequence[str]:
        return ("docker", "rm", "-f", *(container_name(name, self._owner) for name in names))

    async def close(self) -> None:
        self._docker.close()

    # --- in threads ---

    def _start_container(self, spec: LaunchSpec, client: APIClient) -> Instance:
        """Start the engine's container, or find that of an earlier call. Raises HostError."""
        from docker.errors import APIError

        # A container that does not exist yet, or no longer, may hold the name or network: try
        # again.
        deadline = time.monotonic() + _SLOW_CALL_TIMEOUT_S
        while True:
            is_late = time.monotonic() > deadline
            try:
                ensure_network(client, self._network, self._owner)
                container = create(client, spec, self._network, self._owner)
            except APIError as error:
                if error.status_code != 409 or is_late:
                    raise start_error(spec, error) from error
                attributes = self._find_container(spec.name, client)
                if attributes is None:
                    time.sleep(_RETRY_S)
                    continue
                if attributes["Config"]["Labels"]["fitserve.fingerprint"] != spec.fingerprint:
                    raise Conflict(
                        f"An engine with another plan has the name {spec.name}.",
                        hint="Stop that engine, then start this one.",
                    ) from error
                container = attributes["Id"]
                status = attributes["State"]["Status"]
                if status in RUNNING_STATES:
                    return build_instance(attributes, self._network)
                if status != "created":
                    _remove_container(container, client)
                    continue
            try:
                client.start(container)
                return build_instance(client.inspect_container(container), self._network)
            except APIError as error:
                if ambiguous_network(error) and not is_late:
                    continue
                _remove_container(container, client)
                raise start_error(spec, error) from error

    def _list_containers(self, client: APIClient) -> Instances:
        """The instances of all engine containers of this gateway."""
        from docker.errors import NotFound

        instances = []
        for summary in client.containers(
            all=True, filters={"label": [f"fitserve.instance={self._owner}", "fitserve.name"]}
        ):
            labels = summary["Labels"]
            status = summary["State"]
            # An image committed from our container passes our labels to foreign containers.
            if (
                f"/{container_name(labels['fitserve.name'], self._owner)}" not in summary["Names"]
                or status == "removing"
            ):
                continue
            if status in RUNNING_STATES:
                instances.append(
                    running_instance(labels, summary["NetworkSettings"]["Networks"], self._network)
                )
                continue
            try:
                instances.append(
                    build_instance(client.inspect_container(summary["Id"]), self._network)
                )
            except NotFound:
                continue
        return instances

    def _find_container(self, name: str, client: APIClient) -> Attributes | None:
        """Our container of that name, or None. Raises ForeignInstance."""
        from docker.errors import NotFound

        try:
            attributes: Attributes = client.inspect_container(container_name(name, self._owner))
        except NotFound:
            return None
        labels = attributes["Config"]["Labels"] or {}
        if labels.get("fitserve.instance") == self._owner and labels.get("fitserve.name") == name:
            return attributes
        raise ForeignInstance(
            f"A container named {container_name(name, self._owner)} exists, and this gateway did"
            " not make it.",
            hint=(
                "Rename or remove it (`docker rename`, `docker rm`), or give the model another"
                " name."
            ),
        )


def _make_inquiry(
    image: str, owner: str, gpus: tuple[str, ...], client: APIClient
) -> tuple[str, str]:
    """The container, and the API version."""
    remove_lost_inquiries(client, owner)
    return create_inquiry(client, image, owner, gpus), str(client.api_version)


def _start_inquiry(container: str, image: str, client: APIClient) -> None:
    start_inquiry(client, container, image)


def _docker_facts(container: str, client: APIClient) -> tuple[str, bool]:
    """The API version, and whether the container runs."""
    return client.api_version, _is_running(container, client)


def _is_running(container: str, client: APIClient) -> bool:
    from docker.errors import NotFound

    try:
        return client.inspect_container(container)["State"]["Status"] in RUNNING_STATES
    except NotFound:
        return False


def _processes(container: str, is_paused: bool, client: APIClient) -> tuple[EngineProcess, ...]:
    """The processes by `ps` on Docker's machine; none if there is no such `ps`."""
    from docker.errors import APIError

    try:
        rows = client.top(container, ps_args="-ww -eo pid,stat,cputimes,args")["Processes"]
    except APIError:
        return ()
    return tuple(
        EngineProcess(
            pid=int(pid),
            is_stopped=is_paused or stat[0] in "Tt",
            cpu_s=float(cpu),
            command=command[:MAX_COMMAND],
        )
        for pid, stat, cpu, command in rows
        if stat[0] not in "ZX"
    )


def _terminate_container(container: str, client: APIClient) -> None:
    from docker.errors import APIError

    try:
        client.kill(container, "SIGTERM")
    except APIError as error:
        # It has just ended, or is gone.
        if error.status_code not in (404, 409):
            raise


def _remove_container(container: str, client: APIClient) -> None:
    """Kill the container if it runs, and remove it with its anonymous volumes."""
    from docker.errors import APIError

    deadline = time.monotonic() + _SLOW_CALL_TIMEOUT_S
    while True:
        try:
            return client.remove_container(container, v=True, force=True)
        except APIError as error:
            if error.status_code == 404:
                return None
            # Another client is removing it already.
            if error.status_code != 409 or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_S)
