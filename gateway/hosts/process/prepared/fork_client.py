"""A prepared process as the gateway sees it: its status, and the engines that it forks."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gateway.hosts.peer import peer_user
from gateway.hosts.process import procfs
from gateway.hosts.process.prepared.process_start import ProcessStart

PATIENCE_S = 0.9
"""Seconds for an answer. A start without one is a plain start."""
MEMORY_S = 60.0
"""Seconds between two readings of a process's memory: each takes 14 ms of CPU for 500 MiB."""


class ForkedEngine:
    """An engine that waits for its record. Without `start_engine` it ends, and has done nothing."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self.pid = pid

    def start_engine(self) -> None:
        """Let the engine begin. Raises OSError if it is gone."""
        self._connection.sendall(b"!")

    def close(self) -> None:
        self._connection.close()


class ForkClient:
    """A connection to a prepared process, which lives as long as a client is connected."""

    def __init__(self, folder: Path) -> None:
        """Connect to the prepared process of this folder. Raises OSError, ValueError if none
        answers."""
        self._folder = folder
        self._connection = connect(folder)
        try:
            status = query_process(self._connection, {"do": "status"})
            self.pid = int(status["pid"])
            self.read = frozenset(str(name) for name in status["read"])
            self.refused_modules = {
                str(name): str(reason) for name, reason in status["refused"].items()
            }
            self.modules = int(status["modules"])
            self.cgroup = str(status["cgroup"])
        except (KeyError, TypeError, AttributeError) as error:
            self._connection.close()
            raise ValueError(f"its status is {error!r}") from None
        except BaseException:
            self._connection.close()
            raise
        self._process = procfs.read(self.pid)
        self.started_at = procfs.began_at(self._process) if self._process is not None else 0.0
        self._connection.setblocking(False)
        self._memory: tuple[float, int | None] | None = None

    @property
    def pss_bytes(self) -> int | None:
        """Memory of the process, as it was within the last minute. None: not readable."""
        now = time.monotonic()
        if self._memory is None or now - self._memory[0] >= MEMORY_S:
            self._memory = now, read_pss(self.pid)
        return self._memory[1]

    @property
    def is_alive(self) -> bool:
        """Whether the process still serves. The connections of the process close when it ends or
        only notes exit codes."""
        try:
            return self._connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def fork(self, start: ProcessStart) -> ForkedEngine:
        """An engine in its own session. Raises OSError or ValueError if there is none."""
        request = {
            "do": "start",
            "argv": start.argv,
            "env": dict(start.env),
            "cwd": start.cwd,
            "log": start.log,
            "exit_file": start.exit_file,
            "forked_calls": start.forked_calls,
            "kernel_warmups": start.kernel_warmups,
            "kernel_builds": dict(start.kernel_builds),
        }
        connection = connect(self._folder)
        try:
            answer = query_process(connection, request)
            pid = int(answer["pid"]) if "pid" in answer else None
        except BaseException:
            connection.close()
            raise
        if pid is None:
            connection.close()
            raise ValueError(str(answer.get("refused")))
        return ForkedEngine(connection, pid)

    def stop(self) -> None:
        """Tell the process to end. The engines of the process live on, and their exit codes are
        noted."""
        if self._process is not None:
            procfs.send(self._process, signal.SIGTERM)
        self.close()

    def close(self) -> None:
        self._connection.close()


def connect(folder: Path) -> socket.socket:
    """A connection to the process of this user that listens in `folder`. Raises OSError.

    The path of the socket may be too long for an address.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(PATIENCE_S)
    try:
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            connection.connect(f"/proc/self/fd/{folder_fd}/socket")
        finally:
            os.close(folder_fd)
        user = peer_user(connection)
    except BaseException:
        connection.close()
        raise
    if user != os.geteuid():
        connection.close()
        raise PermissionError(f"{folder} belongs to another user")
    return connection


def query_process(connection: socket.socket, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request. Raises OSError or ValueError."""
    connection.sendall(json.dumps(request).encode() + b"\n")
    with connection.makefile("rb") as file:
        answer: dict[str, Any] = json.loads(file.readline())
    return answer


def read_pss(pid: int) -> int | None:
    """Memory of a process in bytes; pages that it shares count in parts. None: not readable."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return None
