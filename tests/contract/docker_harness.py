"""Docker in the contract suite: real containers of a local base image with Python, looked at from
outside through the SDK.

The image is named by BASE_IMAGE; `tests/support/fake_engine.py` and its server are mounted into it.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
from docker.api import APIClient
from docker.errors import APIError, NotFound

from gateway.domain import EngineRef, LaunchSpec, Mount
from gateway.errors import HostError
from gateway.hosts.docker.client import ping, socket_path
from gateway.hosts.docker.container import container_name
from gateway.hosts.docker.host import DockerHost
from gateway.hosts.host import Host
from tests.support.paths import FAKE_ENGINE
from tests.support.patience import HANG_S

BASE_IMAGE = os.environ.get("BASE_IMAGE", "fitserve-base:bookworm")
TEST_LABEL = "fitserve-test"
PROGRAM = (FAKE_ENGINE, FAKE_ENGINE.with_name("scripted_engine.py"))


class DockerHarness:
    log_stays = False

    def __init__(self) -> None:
        self.docker = APIClient(f"unix://{socket_path()}", version="auto", timeout=int(HANG_S))
        self.sweep()
        # One world per harness: its own label, its own network.
        self.instance = f"test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.network = f"fitserve-{self.instance}"
        self.hosts: list[Host] = []
        self.strangers: list[str] = []
        self.host: Host = self.restart()

    def make_spec(
        self, name: str, fingerprint: str = "f1", script: Sequence[str] = (), port: int = 0
    ) -> LaunchSpec:
        port = port or 8000
        return LaunchSpec(
            name=name,
            model="m",
            attempt=1,
            fingerprint=fingerprint,
            engine=EngineRef(kind="fake", version="1", image=BASE_IMAGE),
            argv=(
                "python3",
                "/engine/fake_engine.py",
                "--host",
                "0.0.0.0",
                "--port",
                str(port),
                "--model",
                "m",
                *script,
            ),
            env={},
            gpus=(),
            mounts=tuple(
                Mount(source=str(file), target=f"/engine/{file.name}") for file in PROGRAM
            ),
            shm_bytes=64 * 1024**2,
            port=port,
        )

    def restart(self, base_url: str | None = None, timeout_s: float = HANG_S) -> Host:
        self.host = DockerHost(self.network, self.instance, base_url, timeout_s=timeout_s)
        self.hosts.append(self.host)
        return self.host

    def foreign(self, name: str) -> Callable[[], bool]:
        container = self.docker.create_container(
            BASE_IMAGE,
            ["sleep", "600"],
            name=container_name(name, self.instance),
            labels={TEST_LABEL: self.instance},
        )
        self.strangers.append(container["Id"])
        self.docker.start(container["Id"])
        before = self.inspect(name)

        def is_untouched() -> bool:
            now = self.inspect(name)
            return (now["Id"], now["State"], now["Name"]) == (
                before["Id"],
                before["State"],
                before["Name"],
            )

        return is_untouched

    def inspect(self, name: str) -> dict[str, Any]:
        inspect_container: dict[str, Any] = self.docker.inspect_container(
            container_name(name, self.instance)
        )
        return inspect_container

    def kill_engine(self, name: str) -> None:
        # The signal is sent inside the container, because Docker's own would kill its init.
        script = "import os; os.kill(int(open('/proc/1/task/1/children').read().split()[0]), 9)"
        execution = self.docker.exec_create(
            container_name(name, self.instance), ["python3", "-c", script]
        )
        with suppress(APIError):
            self.docker.exec_start(execution["Id"])

    def members(self, name: str) -> int:
        try:
            rows = (
                self.docker.top(container_name(name, self.instance), "-o pid,args")["Processes"]
                or []
            )
        except APIError as error:
            if "is not running" not in str(error) and error.status_code != 404:
                raise
            return 0
        # Docker's init is not a member; just started, it may not have got to the engine yet.
        return max(1, sum("docker-init" not in command.split()[0] for _pid, command in rows))

    def sweep(self) -> None:
        """Remove remains of killed test runs: their containers would hold the names."""
        for container in self.docker.containers(all=True):
            labels = container["Labels"]
            owner = next(
                (
                    labels[name]
                    for name in ("fitserve.instance", "fitserve.inquiry", TEST_LABEL)
                    if name in labels
                ),
                "",
            )
            run = re.fullmatch(r"test-(\d+)-\w+", owner)
            if run is not None and not Path(f"/proc/{run[1]}").exists():
                with suppress(NotFound):
                    self.docker.remove_container(container["Id"], v=True, force=True)

    async def cleanup(self) -> None:
        containers = self.docker.containers(
            all=True, quiet=True, filters={"label": f"fitserve.instance={self.instance}"}
        )
        for container in [*(our["Id"] for our in containers), *self.strangers]:
            with suppress(NotFound):
                self.docker.remove_container(container, v=True, force=True)
        with suppress(NotFound):
            self.docker.remove_network(self.network)
        for host in self.hosts:
            await host.close()
        self.docker.close()


def docker_harness() -> DockerHarness:
    """Skips the test where there is no Docker Engine or no base image, unless REQUIRE_DOCKER says
    that there must be."""
    answering_docker()
    harness = DockerHarness()
    try:
        harness.docker.inspect_image(BASE_IMAGE)  # type: ignore[no-untyped-call]
    except NotFound:
        harness.docker.close()
        missing(f"there is no image {BASE_IMAGE}")
    return harness


def answering_docker() -> None:
    """Skips the test, as `docker_harness` does, where no Docker Engine answers."""
    try:
        ping(socket_path(), HANG_S)
    except (HostError, OSError) as error:
        missing(f"no Docker Engine answers: {error}")


def missing(reason: str) -> NoReturn:
    if os.environ.get("REQUIRE_DOCKER"):
        pytest.fail(reason)
    pytest.skip(reason)
