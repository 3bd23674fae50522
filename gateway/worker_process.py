"""Processes that run a module of this package."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gateway.logging import Logger

log = Logger("fitserve.children")

# Seconds in which a killed process ends. Only one in a system call that hangs takes longer.
_EXIT_TIMEOUT_S = 5.0
# Seconds for a caller that is not in a hurry: gigabytes of memory may have to be freed first.
_LONG_EXIT_TIMEOUT_S = 30.0


async def spawn(
    program: str, variables: Mapping[str, str], *, errors: bool = False
) -> asyncio.subprocess.Process:
    """Start a module as a process with pipes for its input and output. Raises OSError.

    variables: additions to its environment, which otherwise has the gateway's variables without its
        settings, as these hold keys.
    errors: whether standard error gets a pipe; otherwise the process writes to the gateway's own.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("FITSERVE_")
    }
    # The child must find this package, installed or not.
    paths = (str(Path(__file__).parents[1]), environment.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join(paths).rstrip(os.pathsep)
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        program,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE if errors else None,
        env={**environment, **variables},
        # Ctrl-C in the terminal must not reach the child: the gateway ends it.
        start_new_session=True,
    )


async def kill(child: asyncio.subprocess.Process) -> int | None:
    """Kill the child. Returns its exit code, which may be from an earlier end.

    None: a system call of the child hangs, for example on a dead mount. The kernel ends the child
    after the call.

    A caller that is cancelled waits for that end too: an event loop that ended before it would
    leave the child unreaped.
    """
    with suppress(ProcessLookupError):
        child.kill()
    # asyncio reports the end only once the pipes are closed, and does not read from a full one.
    # Closing the transport instead would reap the child, and the waiter would then report 255.
    transport = child._transport  # type: ignore[attr-defined] # noqa: SLF001 - no public way
    for pipe in filter(None, map(transport.get_pipe_transport, range(3))):
        pipe.close()
    try:
        async with asyncio.timeout(_LONG_EXIT_TIMEOUT_S):
            return await _wait(child)
    except TimeoutError:
        log.warning("a killed process does not end", pid=child.pid)
        return None
    except asyncio.CancelledError:
        with suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_TIMEOUT_S):
                await _wait(child)
        raise


async def _wait(child: asyncio.subprocess.Process) -> int:
    """Wait for the end of the child. Returns its exit code."""
    code = await child.wait()
    if child.stdin is not None:
        # Python 3.11.2 logs the error of a pipe with unread bytes, unless something asks for it.
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_EXIT_TIMEOUT_S):
                await child.stdin.wait_closed()
    return code
