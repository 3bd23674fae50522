"""The link's process, started again whenever it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

from gateway.errors import HostError
from gateway.hosts.cluster.membership import Membership
from gateway.hosts.cluster.ray_start import ray_environment
from gateway.hosts.cluster.restart_pause import RestartPause
from gateway.hosts.known_problems import KnownProblems
from gateway.logging import Logger

log = Logger("fitserve.cluster")

_READY_S = 60.0


class LinkProcess:
    """The socket of the link is at `path`. `spawn`, `start` and `close` belong to one event
    loop."""

    def __init__(self, membership: Membership, path: Path) -> None:
        self._membership = membership
        self.path = path
        self._ready = asyncio.Event()
        self._run_task: asyncio.Task[None] | None = None
        self._problems = KnownProblems()
        """The exit code of the last process."""

    async def start(self) -> None:
        """Start the process and wait until it answers. Raises HostError."""
        self.spawn()
        try:
            async with asyncio.timeout(_READY_S):
                await self._ready.wait()
        except TimeoutError:
            await self.close()
            raise HostError(
                f"Ray does not answer on this machine within {_READY_S:.0f} s.",
                hint="Run `fitserve doctor`, and see that `fitserve cluster join` runs here.",
            ) from None

    def spawn(self) -> None:
        """Start the process."""
        self._run_task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        if self._run_task is not None:
            self._run_task.cancel()
            await asyncio.gather(self._run_task, return_exceptions=True)

    async def _run(self) -> None:
        pause = RestartPause()
        while True:
            await pause.wait(was_well=await self._run_once())

    async def _run_once(self) -> bool:
        """Run the process until it ends. Returns whether it ever answered."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "gateway.hosts.cluster.link",
            self._membership.head,
            str(self.path),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=ray_environment(self._membership.token_file, os.environ),
        )
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        try:
            # Ray's own lines come before.
            while (line := await process.stdout.readline()) not in (b"", b"ready\n"):
                pass
            has_answered = line == b"ready\n"
            if has_answered:
                self._ready.set()
                self._problems.forget(self.path)
                while await process.stdout.read(4096):
                    pass
            code = await process.wait()
            if self._problems.record(self.path, str(code)):
                log.warning("the link to the cluster ended", code=code)
            return has_answered
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
