"""Child processes of inquiries: write the input, stream the output lines, kill the session."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gateway.engines.inquiry.output import InquiryOutput
from gateway.errors import HostError
from gateway.worker_process import kill

_CHUNK = 64 * 1024


async def stream_child_lines(
    command: Sequence[str], input_bytes: bytes, *, cwd: Path, env: Mapping[str, str]
) -> AsyncGenerator[bytes, None]:
    """The lines of its standard output, without line ends. Raises HostError with its last words if
    it fails.

    The whole session of the child ends with the generator. Standard input stays open until then.
    """
    try:
        child = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=cwd,
            env=dict(env),
            start_new_session=True,
        )
    except OSError as error:
        raise HostError(
            f"{command[0]} could not be started: {error.strerror}.",
            hint="Install the engine again.",
        ) from error
    output = InquiryOutput()
    feeding = asyncio.create_task(_feed(child, input_bytes))
    listening = asyncio.create_task(_listen(child, output))
    try:
        while child.stdout and (text := await child.stdout.read(_CHUNK)):
            for line in output.add_output(text):
                yield line
        await listening
        if code := await child.wait():
            raise output.exit_error(code)
    finally:
        feeding.cancel()
        listening.cancel()
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await kill(child)
        await asyncio.gather(feeding, listening, return_exceptions=True)


async def _feed(child: asyncio.subprocess.Process, input_bytes: bytes) -> None:
    if child.stdin is not None:
        with suppress(BrokenPipeError, ConnectionResetError):
            child.stdin.write(input_bytes)
            await child.stdin.drain()


async def _listen(child: asyncio.subprocess.Process, output: InquiryOutput) -> None:
    """Read standard error. A child that floods it is killed; then standard output ends too, and
    this error is raised."""
    try:
        while child.stderr and (text := await child.stderr.read(_CHUNK)):
            output.add_error_output(text)
    except HostError:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        raise
