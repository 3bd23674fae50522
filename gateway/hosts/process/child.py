"""A child process that is asked once: its input all at once, its lines as they come, and nothing of it is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gateway.errors import HostError
from gateway.inquiry.document import MOST_BYTES, MOST_LINE

_LAST_WORDS = 20


async def lines_of(command: Sequence[str], given: bytes, *, cwd: Path, env: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
    """The lines of its standard output, without their ends. Raises HostError where it fails, with the last it said.

    Its whole session ends with the generator, however that ends.
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
            limit=MOST_LINE,
        )
    except OSError as error:
        raise HostError(f"{command[0]} could not be started: {error.strerror}.", hint="Install the engine anew.") from error
    said: deque[bytes] = deque(maxlen=_LAST_WORDS)
    helpers = [asyncio.create_task(_feed(child, given)), asyncio.create_task(_keep(child, said))]
    total = 0
    try:
        while line := await _line(child):
            total += len(line)
            if total > MOST_BYTES:
                raise HostError("The engine's answers have no end.", hint="See whether the image is what it says it is.")
            yield line.rstrip(b"\n")
        code = await child.wait()
        await helpers[1]
        if code:
            words = (said[-1] if said else b"it said nothing").decode(errors="replace").strip()[:300]
            raise HostError(
                f"The engine could not be asked (exit code {code}): {words}.", hint="The forecast by the rules stays."
            )
    finally:
        for helper in helpers:
            helper.cancel()
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()


async def _line(child: asyncio.subprocess.Process) -> bytes:
    try:
        return await child.stdout.readline() if child.stdout else b""
    except ValueError:
        raise HostError(
            "The engine answered with an endless line.", hint="See whether the image is what it says it is."
        ) from None


async def _feed(child: asyncio.subprocess.Process, given: bytes) -> None:
    if child.stdin is not None:
        with suppress(BrokenPipeError, ConnectionResetError):
            child.stdin.write(given)
            await child.stdin.drain()
        child.stdin.close()


async def _keep(child: asyncio.subprocess.Process, said: deque[bytes]) -> None:
    """The last lines of standard error; a line without an end is cut."""
    rest = b""
    while child.stderr and (piece := await child.stderr.read(65536)):
        *whole, rest = (rest + piece).split(b"\n")
        said.extend(line for line in whole if line.strip())
        rest = rest[-4096:]
    if rest.strip():
        said.append(rest)
