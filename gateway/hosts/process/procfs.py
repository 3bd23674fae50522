"""Processes as Linux shows them (/proc), and signals that cannot hit the wrong one.

A process is identified by pid and start time: another process may have its pid by now.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PROC = Path("/proc")
_LISTEN = "0A"
"""The state of a listening socket. Source: include/net/tcp_states.h of Linux."""


@dataclass(frozen=True)
class ProcessStat:
    """One line of /proc/PID/stat. `start_ticks` is the start time in clock ticks since boot."""

    pid: int
    state: str
    session: int
    start_ticks: int
    cpu_ticks: int = 0
    threads: int = 1

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs. A zombie counts until its last thread has ended, as it
        holds GPU memory until then."""
        return self.state not in "ZX" or self.threads > 1

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return self.state in "Tt"

    @property
    def cpu_s(self) -> float:
        """Processor time in seconds."""
        return self.cpu_ticks / os.sysconf("SC_CLK_TCK")

    def command(self, max_bytes: int) -> str:
        """The beginning of its command line; empty if it is gone."""
        with suppress(OSError), (PROC / str(self.pid) / "cmdline").open("rb") as file:
            return file.read(max_bytes).replace(b"\0", b" ").decode(errors="replace").strip()
        return ""


@cache
def began_at(process: ProcessStat) -> float:
    """The start of a process, in Unix seconds."""
    return (
        time.time()
        - time.clock_gettime(time.CLOCK_BOOTTIME)
        + process.start_ticks / os.sysconf("SC_CLK_TCK")
    )


def boot_id() -> str:
    """The identity of this boot: pids and start times of another boot mean nothing."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def read(pid: int) -> ProcessStat | None:
    """The process that has this pid now; None also if processes of other users are hidden."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The command name stands in parentheses and may hold anything: fields are counted from the last
    # one.
    fields = text.rpartition(")")[2].split()
    return ProcessStat(
        pid=pid,
        state=fields[0],
        session=int(fields[3]),
        start_ticks=int(fields[19]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        threads=int(fields[17]),
    )


def all_processes() -> Iterator[ProcessStat]:
    """All processes."""
    with os.scandir(PROC) as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isdigit()]
    for pid in pids:
        if (process := read(pid)) is not None:
            yield process


def session(leader: int) -> list[ProcessStat]:
    """The living processes of the session that `leader` leads, or led."""
    return [
        process for process in all_processes() if process.session == leader and process.is_alive
    ]


def writers(file: Path) -> list[ProcessStat]:
    """The processes that have this file open for writing. Processes of other users are invisible,
    and no engines of ours."""
    with suppress(FileNotFoundError):
        target = file.stat()
        return [
            process
            for process in all_processes()
            if process.is_alive and _writes_file(process.pid, target)
        ]
    return []


def _writes_file(pid: int, status: os.stat_result) -> bool:
    with suppress(OSError), os.scandir(PROC / str(pid) / "fd") as entries:
        for entry in entries:
            # It may be closed meanwhile.
            with suppress(OSError):
                if os.path.samestat(entry.stat(), status):
                    flags = (
                        (PROC / str(pid) / "fdinfo" / entry.name)
                        .read_text()
                        .partition("flags:")[2]
                        .split()[0]
                    )
                    if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                        return True
    return False


def listening_ports() -> frozenset[int]:
    """The TCP ports on which programs of this machine listen."""
    ports = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for row in (PROC / "net" / table).read_text().splitlines()[1:]:
                _, local_address, _, state, *_ = row.split()
                if state == _LISTEN:
                    ports.add(int(local_address.rpartition(":")[2], 16))
    return frozenset(ports)


def send(process: ProcessStat, number: signal.Signals) -> None:
    """Signal exactly this process. Nothing happens if it is gone, even if its pid is in use
    again."""
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(process.pid)
        try:
            now = read(process.pid)
            if now is not None and now.start_ticks == process.start_ticks:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def reap(pid: int) -> tuple[bool, int | None]:
    """Take the exit of a child: whether it has ended, and its exit code if it is ours (-9 for
    SIGKILL)."""
    try:
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return True, None
    return (True, os.waitstatus_to_exitcode(status)) if ended_pid else (False, None)
