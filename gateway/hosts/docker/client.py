"""Calls to Docker through the SDK, in threads, each with a timeout and a clear error."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from gateway.errors import HostError

if TYPE_CHECKING:
    from docker.api import APIClient

T = TypeVar("T")


def socket_path(base_url: str | None = None) -> str:
    """The socket of `base_url`, of DOCKER_HOST, or the usual one. Raises HostError if it is not
    local."""
    url = base_url or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if not url.startswith("unix://"):
        raise HostError(
            f"Docker at {url} cannot be used: engines are reached at their containers' addresses,"
            " which only this machine has.",
            hint="Unset DOCKER_HOST, or set it to unix:///var/run/docker.sock.",
        )
    return url.removeprefix("unix://")


def ping(path: str, timeout_s: float) -> None:
    """Ping Docker without the SDK, whose import takes a quarter of a second. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect(path)
        connection.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
        answer = connection.recv(64)
    if b" 200 " not in answer:
        raise ConnectionError(f"it says {answer!r}")


def is_available(base_url: str | None = None) -> bool:
    """Whether a Docker Engine of this machine answers within 2 s."""
    try:
        ping(socket_path(base_url), 2)
    except (HostError, OSError):
        return False
    return True


def is_listening(base_url: str | None = None) -> bool:
    """Whether a program listens on Docker's socket. A busy Docker may answer much later."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(socket_path(base_url))
    except (HostError, OSError):
        return False
    return True


def information(base_url: str | None = None) -> dict[str, Any] | None:
    """The output of `docker info`; None if Docker does not answer."""
    from docker.api import APIClient
    from docker.errors import DockerException

    try:
        with contextlib.closing(
            APIClient(f"unix://{socket_path(base_url)}", version="auto", timeout=5)
        ) as client:
            info: dict[str, Any] = client.info()
    except (HostError, DockerException, OSError):
        return None
    return info


def cgroup_driver() -> str | None:
    """The manager of container cgroups, "systemd" or "cgroupfs"; None if unknown."""
    driver = (information() or {}).get("CgroupDriver")
    return str(driver) if driver else None


class DockerClient:
    """Runs work with a connected SDK client. `timeout_s` is the longest silence that is not a
    failure."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self.path = path
        self.timeout_s = timeout_s
        self._clients: dict[float, APIClient] = {}
        self._lock = threading.Lock()
        # Own threads: a hanging Docker must not block other work.
        self._threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="docker")

    async def call(self, work: Callable[[APIClient], T], timeout_s: float = 0) -> T:
        """Run `work` in a thread, with a longer timeout for slow work. Raises HostError.

        Work must be repeatable: it is repeated when the connection broke.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, self._run_call, work, max(self.timeout_s, timeout_s)
        )

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._disconnect()

    def _run_call(self, work: Callable[[APIClient], T], timeout_s: float) -> T:
        """Run a call of Docker's API, and repeat it if Docker was replaced. Raises HostError."""
        from docker.errors import APIError, DockerException
        from requests import RequestException, Timeout

        tries = 2
        while True:
            tries -= 1
            try:
                return work(self._connect(timeout_s))
            except APIError as error:
                # Docker was replaced by a version that does not speak the negotiated API.
                if (
                    not tries
                    or error.status_code != 400
                    or "client version" not in str(error.explanation)
                ):
                    raise HostError(
                        f"Docker refused: {error.explanation or error}.", hint=_LOG
                    ) from error
            except (DockerException, RequestException) as error:
                # The SDK wraps errors of its connection.
                if not tries or isinstance(error, Timeout) or isinstance(error.__cause__, Timeout):
                    self._explain_silence(2)
                    broken = f"no reply within {timeout_s:g} s, or a broken one"
                    raise HostError(
                        f"Docker does not answer on {self.path}: {broken}.", hint=_LOG
                    ) from error
            self._disconnect()

    def _connect(self, timeout_s: float) -> APIClient:
        from docker.api import APIClient

        if timeout_s not in self._clients:
            self._explain_silence(timeout_s)
        with self._lock:
            if timeout_s not in self._clients:
                self._clients[timeout_s] = APIClient(
                    f"unix://{self.path}",
                    version="auto",
                    timeout=timeout_s,  # type: ignore[arg-type]
                )
            return self._clients[timeout_s]

    def _disconnect(self) -> None:
        """Close idle connections now, and used ones after their answer."""
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()

    def _explain_silence(self, timeout_s: float) -> None:
        """Ping Docker. Raises HostError that says why it does not answer."""
        problem = "Docker does not answer"
        try:
            ping(self.path, min(self.timeout_s, timeout_s))
        except FileNotFoundError:
            raise HostError(
                f"{problem}: there is no socket {self.path}.",
                hint=(
                    f"{_START}, set DOCKER_HOST to its socket, or set FITSERVE_HOST_KIND=process to"
                    " run without Docker."
                ),
            ) from None
        except PermissionError:
            raise HostError(
                f"{problem}: this user may not use the socket {self.path}.",
                hint=(
                    f"Add the user to the socket's group (`stat -c %G {self.path}`); with compose,"
                    " set DOCKER_GID to that group's number."
                ),
            ) from None
        except ConnectionRefusedError:
            raise HostError(
                f"{problem}: nothing listens on {self.path}.", hint=f"{_START}."
            ) from None
        except TimeoutError:
            raise HostError(
                f"{problem} on {self.path}: it does not reply in time.", hint=_LOG
            ) from None
        except OSError as error:
            raise HostError(f"{problem} on {self.path}: {error}.", hint=_LOG) from None


_START = "Start Docker (`systemctl start docker`)"
_LOG = "See Docker's log: `journalctl -u docker`."
