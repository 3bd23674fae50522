"""A program of this package in a process of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


async def started(
    program: str, variables: Mapping[str, str], *, errors: bool = False
) -> asyncio.subprocess.Process:
    """The process of a module, with pipes for its input and output. errors: a pipe for what it
    writes to standard error too, else that
    goes where the gateway's goes. variables: of its environment, beside the gateway's without its
    settings, which hold keys. Raises OSError.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("FITSERVE_")
    }
    # So that the child finds this very package, installed or not.
    paths = (str(Path(__file__).parents[1]), environment.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join(paths).rstrip(os.pathsep)
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", program),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE if errors else None,
        env={**environment, **variables},
        # Away from the terminal's Ctrl-C: the gateway decides when it ends.
        start_new_session=True,
    )


async def end(child: asyncio.subprocess.Process) -> int:
    """Kill it. Its exit code, which is that of a kill only where it was alive."""
    with suppress(ProcessLookupError):
        child.kill()
    # asyncio tells the end when the pipes are closed, and reads no more of one of which too much
    # waits to be taken. The transport itself is not closed: it would look whether the child lives,
    # and take the code from who waits for it, who then says 255.
    transport = child._transport  # type: ignore[attr-defined] # noqa: SLF001 - there is no other way to close them
    for pipe in filter(None, map(transport.get_pipe_transport, range(3))):
        pipe.close()
    return await child.wait()
