"""The process host in the contract suite: real processes, looked at through /proc from outside."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from gateway.domain import EngineRef, LaunchSpec
from gateway.hosts.process.host import ProcessHost
from tests.support.paths import FAKE_ENGINE


def living_in(folder: Path) -> list[int]:
    """Processes whose working directory is `folder`, which every member of an engine's family
    inherits."""
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if os.readlink(entry / "cwd").removesuffix(" (deleted)") == str(folder):  # noqa: PTH115
                    processes.append(int(entry.name))
    return processes


def free_port() -> int:
    """Below those that Linux gives to outgoing connections: one of these may take it while nobody
    listens there. No port is given twice in ten
    thousand, to whichever run of tests beside this one: the last one is in a file."""
    last = os.open(
        Path(tempfile.gettempdir(), "fitserve-tests-port"), os.O_RDWR | os.O_CREAT, 0o666
    )
    try:
        fcntl.flock(last, fcntl.LOCK_EX)
        port = int(os.pread(last, 16, 0) or 10_000)
        while True:
            port = port + 1 if port < 19_899 else 10_000
            with socket.socket() as probe, suppress(OSError):
                probe.bind(("127.0.0.1", port))
                os.pwrite(last, b"%d" % port, 0)
                return port
    finally:
        os.close(last)


def killed_at_line(number: int, make_host: Callable[[], ProcessHost], spec: LaunchSpec) -> bool:
    """Start in a child that gets SIGKILL at the `number`th line of our code inside `start`; false:
    it ended before."""
    pid = os.fork()
    if pid == 0:
        lines_to_go = number

        def trace(frame: FrameType, event: str, _argument: object) -> Any:
            nonlocal lines_to_go
            if "gateway/hosts" not in frame.f_code.co_filename:
                return None
            if event == "line":
                lines_to_go -= 1
                if lines_to_go == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        host = make_host()
        threading.settrace(trace)
        sys.settrace(trace)
        asyncio.run(host.start(spec))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def fake_spec(
    name: str, fingerprint: str, script: Sequence[str], port: int, *, address: str | None = None
) -> LaunchSpec:
    """The start of the fake engine as a process. port 0: a free one. address: where it listens."""
    port = port or free_port()
    return LaunchSpec(
        name=name,
        model="m",
        attempt=1,
        fingerprint=fingerprint,
        engine=EngineRef(kind="fake", version="1"),
        argv=(
            sys.executable,
            "-S",
            str(FAKE_ENGINE),
            *((f"--host={address}",) if address else ()),
            "--port",
            str(port),
            "--model",
            "m",
            *script,
        ),
        env={},
        gpus=(),
        shm_bytes=0,
        port=port,
    )


class ProcessHarness:
    log_stays = True

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        python = data_dir / "engines/fake-1/bin/python"
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)
        (data_dir / "engines/fake-1/.complete").touch()
        self.host = ProcessHost(data_dir)

    def make_spec(
        self, name: str, fingerprint: str = "f1", script: Sequence[str] = (), port: int = 0
    ) -> LaunchSpec:
        return fake_spec(name, fingerprint, script, port)

    def restart(self) -> ProcessHost:
        self.host = ProcessHost(self.data_dir)
        return self.host

    def record(self, name: str) -> Path:
        return self.data_dir / "instances" / f"{name}.json"

    def foreign(self, name: str) -> Callable[[], bool]:
        path = self.record(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("not a record of ours")
        return lambda: path.read_text() == "not a record of ours"

    def pid(self, name: str) -> int:
        """The engine's main process, as its record has it."""
        pid: int = json.loads(self.record(name).read_text())["pid"]
        return pid

    def kill_engine(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGKILL)

    def members(self, name: str) -> int:
        return len(living_in(self.data_dir / "run" / name))

    async def cleanup(self) -> None:
        for instance in await self.host.list():
            await self.host.stop(instance.name, grace_s=0)
        await self.host.close()
