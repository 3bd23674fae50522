"""Commands and programs of `gateway` as processes that need not import it anew, which takes a
second of processor time each.

They are forked from one process for the whole run of tests (fork_server.py), which has imported the
gateway and done nothing else. A test of the start itself starts the process as users do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.support.paths import ROOT
from tests.support.patience import hang_s


class Forked:
    """A running process, with the interface of `subprocess.Popen`. Its standard streams are the
    given descriptors; the caller closes its own ends. asks: it is a gateway, whose planner is
    forked too."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        streams: tuple[int, int, int],
        *,
        folder: Path = ROOT,
        terminal: bool = False,
        asks: bool = False,
    ) -> None:
        self.report, report = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fields: dict[str, Any] = {
            "module": module,
            "arguments": [*arguments],
            "environment": {**environment},
            "folder": str(folder),
        }
        fields |= {"umask": _umask(), "terminal": terminal, "asks": asks}
        with report, _asking:
            socket.send_fds(_server(), [json.dumps(fields).encode()], [*streams, report.fileno()])
        self.report.settimeout(hang_s())
        self.pid = int(self.report.recv(64))
        self._code: int | None = None

    def wait(self, timeout_s: float | None = None) -> int:
        """The exit code; negative numbers are signals. timeout_s: by default that of a hang. Raises
        TimeoutError."""
        if self._code is None:
            self.report.settimeout(hang_s() if timeout_s is None else timeout_s)
            self._code = int(self.report.recv(64))
            self.report.close()
        return self._code

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        with contextlib.suppress(BlockingIOError):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _umask() -> int:
    """Of this process, which cannot be asked for it without being given another one for a
    moment."""
    return int(Path("/proc/self/status").read_text().partition("\nUmask:")[2].split()[0], 8)


def run(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    text: str = "",
    timeout_s: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """The command `fitserve` with these arguments and this environment, and with `text` on its
    standard input."""
    with (
        tempfile.TemporaryFile() as file,
        tempfile.TemporaryFile() as temporary_file,
        tempfile.TemporaryFile() as output_file,
    ):
        file.write(text.encode())
        file.seek(0)
        command = Forked(
            "gateway.__main__",
            arguments,
            environment,
            (file.fileno(), temporary_file.fileno(), output_file.fileno()),
        )
        try:
            code = command.wait(timeout_s)
        except TimeoutError:
            command.kill()
            raise
        return subprocess.CompletedProcess(
            ["fitserve", *arguments], code, _whole(temporary_file), _whole(output_file)
        )


def _whole(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


class _Pipes:
    """The transport of a subprocess, as far as its pipes are asked for: one socket is its input and
    output, another one its errors."""

    def __init__(self, *sockets: asyncio.WriteTransport) -> None:
        self._sockets = dict(zip((0, 2), sockets, strict=False))

    def get_pipe_transport(self, number: int) -> asyncio.WriteTransport | None:
        return self._sockets.get(number)


class ForkedProgram:
    """The result of `gateway.worker_process.spawn`, as far as its callers need it. stderr: where
    standard error has a socket."""

    def __init__(
        self,
        process: Forked,
        stdin: asyncio.StreamWriter,
        stdout: asyncio.StreamReader,
        *errors: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self.pid, self.stdin, self.stdout = process.pid, stdin, stdout
        self._process, self._errors = process, errors
        self._transport = _Pipes(stdin.transport, *(writer.transport for _, writer in errors))
        self._ended = asyncio.ensure_future(self._watch())
        # A watch that is cancelled before its first step has no block that it leaves.
        self._ended.add_done_callback(lambda _: process.report.close())

    @property
    def returncode(self) -> int | None:
        if not self._ended.done():
            return None
        self._close()
        return self._ended.result()

    async def wait(self) -> int:
        await asyncio.shield(self._ended)
        self._close()
        return self._ended.result()

    async def communicate(self, text: bytes) -> tuple[bytes, bytes]:
        """Its output and its errors, once it has read the text and ended."""
        self.stdin.write(text)
        self.stdin.write_eof()
        streams = (self.stdout, *(reader for reader, _ in self._errors))
        output, *errors = await asyncio.gather(*(stream.read() for stream in streams))
        await self.wait()
        return output, b"".join(errors)

    def kill(self) -> None:
        """Raises ProcessLookupError."""
        # `Forked.kill` would take the exit status that is watched for.
        if not self._ended.done():
            os.kill(self.pid, signal.SIGKILL)

    def _close(self) -> None:
        self.stdin.close()
        for _, writer in self._errors:
            writer.close()

    async def _watch(self) -> int:
        self._process.report.setblocking(False)
        return int(await asyncio.get_running_loop().sock_recv(self._process.report, 64))


async def spawn(
    program: str, variables: Mapping[str, str], *, errors: bool = False
) -> ForkedProgram:
    """In the place of `gateway.worker_process.spawn`."""
    pairs = [socket.socketpair() for _ in range(2 if errors else 1)]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("FITSERVE_")
    }
    with contextlib.ExitStack() as stack:
        first, *second = [stack.enter_context(child_end).fileno() for _, child_end in pairs]
        streams = (first, first, second[0] if errors else 2)
        process = Forked(program, (), {**environment, **variables}, streams)
    connections = [await asyncio.open_connection(sock=parent_end) for parent_end, _ in pairs]
    stdout, stdin = connections[0]
    return ForkedProgram(process, stdin, stdout, *connections[1:])


_asking = threading.Lock()
servers: list[socket.socket] = []
"""The one that is asked, once there is one."""


def _server() -> socket.socket:
    if not servers:
        servers.append(_new_server())
    return servers[0]


def _new_server() -> socket.socket:
    server_end, client_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("FITSERVE_")
    }
    with client_end:
        # It leaves at once, for tests look at the children of their process, and ends with the
        # other end of its socket.
        subprocess.run(
            [sys.executable, "-m", "tests.support.fork_server", str(client_end.fileno())],
            cwd=ROOT,
            env=environment | {"MALLOC_ARENA_MAX": "2"},
            pass_fds=[client_end.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            check=True,
        )
    return server_end
