"""CPU and memory of a process tree from /proc; ports, file limits, and waits for a server."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def raise_file_limit() -> int:
    """The number of files a process may now open; children inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _stat(pid: int | str) -> list[str]:
    """Fields of /proc/PID/stat after the name: [1] is the parent, [11] to [14] ticks of user,
    system, and ended children."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def tree(pid: int) -> list[int]:
    """`pid` and every process below it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - read many times a second
        if entry.isdigit():
            with contextlib.suppress(OSError):
                children.setdefault(int(_stat(entry)[1]), []).append(int(entry))
    found, to_visit = [], [pid]
    while to_visit:
        found.append(to_visit.pop())
        to_visit += children.get(found[-1], [])
    return found


def cpu_s(pid: int) -> float:
    """Seconds of CPU time that the tree of `pid` has used, in the kernel and outside it."""
    total = 0
    for member in tree(pid):
        with contextlib.suppress(OSError):
            total += sum(int(field) for field in _stat(member)[11:15])
    return total / TICKS


def resident_mib(pid: int) -> float:
    total = 0.0
    for member in tree(pid):
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{member}/statm").read_text().split()[1]) * PAGE_MIB
    return total


class Peak:
    """The largest resident size of a tree while entered, looked at 20 times a second."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.mib = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.mib = max(self.mib, resident_mib(self.pid))
            if self._over.wait(0.05):
                return


def get(url_port: int, path: str, key: str = "") -> int:
    """Status of a GET at this machine; 0 when nothing answers."""
    return get_body(url_port, path, key)[0]


def get_body(port: int, path: str, key: str = "") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path, headers={"authorization": f"Bearer {key}"})
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def wait_until(
    port: int,
    path: str,
    process: subprocess.Popen[bytes],
    seconds: float,
    key: str = "",
    holds: bytes = b"",
) -> bool:
    """Whether a GET gave 200 with a body that `holds` this, in time, with the process still
    there."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        status, body = get_body(port, path, key)
        if status == 200 and holds in body:
            return True
        time.sleep(0.1)
    return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads its own group, and the group with it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
            return
