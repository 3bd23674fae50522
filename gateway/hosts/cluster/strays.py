"""Processes of Ray on this machine that outlived the program that started them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gateway.hosts.cluster.relay import SOCKET_VARIABLE

_POLL_S = 0.05
_LIMIT_S = 10.0


def kill_orphaned_ray(socket: Path) -> int:
    """Kill all processes of the raylet of this node service, and return their number.

    Ray refuses a start while one of them lives. Engines have another environment.
    """
    ended_pids = set[int]()
    deadline = time.monotonic() + _LIMIT_S
    while (pids := _processes(socket)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended_pids.update(pids)
        time.sleep(_POLL_S)
    return len(ended_pids)


def _processes(socket: Path) -> Sequence[int]:
    """Living processes with the raylet's environment."""
    marker = os.fsencode(f"{SOCKET_VARIABLE}={socket}")
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        # A zombie, and a process of another user, give nothing.
        with suppress(OSError):
            if marker in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
    return pids
