"""The supervisor of a machine of the cluster: keeps its node service and its raylet running.

Both end with the supervisor. Engines do not: the next node service adopts them. A raylet that Ray
declared lost ends itself when the network heals, and is started again as a new node of Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import stat
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from gateway.errors import SettingsError
from gateway.hosts.cluster.head_answer import REFUSAL_CODE
from gateway.hosts.cluster.head_check import HeadAway, judge, local_versions
from gateway.hosts.cluster.membership import (
    Membership,
    check_token,
    count_raylet_start,
    folder,
    node_socket,
)
from gateway.hosts.cluster.ray_start import raylet_command, raylet_environment
from gateway.hosts.cluster.restart_pause import MAX_PAUSE_S, RestartPause
from gateway.hosts.cluster.strays import kill_orphaned_ray
from gateway.hosts.known_problems import KnownProblems
from gateway.hosts.process import procfs
from gateway.logging import Logger

log = Logger("fitserve.cluster")

# A program that ran for so long did its work.
_HEALTHY_RUN_S = 10 * MAX_PAUSE_S
_GRACE_S = 10.0
_POLL_S = 0.05
# Ray adds some 65 characters, and the path of a Unix socket has 107 at most.
_MAX_TEMP_DIR_CHARACTERS = 40
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


async def supervise(membership: Membership, data: Path, join_event: asyncio.Event) -> None:
    """Run until cancelled. join_event: set once the head has not refused this machine. Raises
    SettingsError where it does."""
    node = [sys.executable, "-m", "gateway.__main__", "cluster", "node"]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(
            _run_program("node service", lambda: _run_once(node, dict(os.environ), None))
        )
        tasks.create_task(_run_raylet(membership, data, join_event))


async def _run_raylet(membership: Membership, data: Path, join_event: asyncio.Event) -> None:
    socket = node_socket(data)
    answer_file = folder(data) / "head-answer.json"
    output = folder(data) / "raylet.log"
    temp_dir = _temp_dir(data)
    environment = raylet_environment(membership, socket, os.environ)

    async def run() -> int:
        await asyncio.to_thread(kill_orphaned_ray, socket)
        check_token(membership.token_file)
        start_number = count_raylet_start(data)
        command = raylet_command(membership, temp_dir, answer_file, start_number)
        code = await _run_once(command, environment, output)
        if code == REFUSAL_CODE:
            judge(membership, json.loads(answer_file.read_bytes()), local_versions())
        join_event.set()
        return code

    try:
        await _run_program("raylet", run)
    finally:
        kill_orphaned_ray(socket)


async def _run_program(name: str, run: Callable[[], Awaitable[int]]) -> None:
    """Run a program whenever it does not run. run: until its end; it returns the exit code. Raises
    SettingsError of `run`."""
    pause = RestartPause()
    problems = KnownProblems()
    while True:
        start_s = asyncio.get_running_loop().time()
        was_well = False
        log.info("starting", program=name)
        try:
            code = await run()
        except HeadAway as error:
            if problems.record(name, str(error)):
                log.warning("waiting for the head", reason=str(error))
        else:
            problems.forget(name)
            log.warning("ended; it is started again", program=name, code=code)
            was_well = asyncio.get_running_loop().time() - start_s > _HEALTHY_RUN_S
        await pause.wait(was_well=was_well)


async def _run_once(
    command: Sequence[str], environment: Mapping[str, str], output: Path | None
) -> int:
    """Run a command until its end, and return its exit code. A cancellation stops the command."""
    with contextlib.ExitStack() as files:
        stream = files.enter_context(output.open("wb")) if output is not None else None
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=environment,
            preexec_fn=_stop_with_parent,
            start_new_session=True,
        )
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                try:
                    async with asyncio.timeout(_GRACE_S):
                        await process.wait()
                except TimeoutError:
                    process.kill()
                    await process.wait()
            await _kill_session(process.pid)


async def _kill_session(leader: int) -> None:
    """Kill the remaining processes of a session, and wait for their end. Agents of Ray live a
    little longer than their raylet, and their titles hide their environment. Engines have sessions
    of their own."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_GRACE_S):
            while processes := procfs.session(leader):
                for process in processes:
                    procfs.send(process, signal.SIGKILL)
                await asyncio.sleep(_POLL_S)


def _stop_with_parent() -> None:
    """SIGTERM for this process when the supervisor is gone, however it ended."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _temp_dir(data: Path) -> Path:
    """The folder of Ray's sessions. Raises SettingsError if another user could have made it.

    Ray lets every user write to it, so it lies in a folder only for this user.
    """
    parent = folder(data)
    if len(str(parent / "ray")) > _MAX_TEMP_DIR_CHARACTERS:
        parent = Path("/tmp") / f"fitserve-ray-{os.getuid()}"  # noqa: S108 - checked below
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = parent.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise SettingsError(
            f"Another user can write to {parent}, the folder for Ray's sockets.",
            hint="Remove it, or set FITSERVE_DATA_DIR to a path of at most 32 characters.",
        )
    return parent / "ray"
