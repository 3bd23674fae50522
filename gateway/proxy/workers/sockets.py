"""Sockets of a gateway with workers: one per worker on the public port, one for the control
process."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from pathlib import Path

from gateway.errors import SettingsError, listen_error
from gateway.proxy.limits import limit_send_buffer
from gateway.proxy.upstream_connection import watch_peer

_BACKLOG = 2048


def bind_shared_sockets(bound: socket.socket, count: int) -> list[socket.socket]:
    """`count` listening sockets at the address of `bound`, which reserved the port and is closed.
    Raises SettingsError."""
    family = bound.family
    address = bound.getsockname()
    bound.close()
    listeners: list[socket.socket] = []
    try:
        for _ in range(count):
            listener = socket.socket(family, socket.SOCK_STREAM)
            listeners.append(listener)
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                listener.setsockopt(socket.SOL_SOCKET, option, 1)
            watch_peer(listener)
            limit_send_buffer(listener)
            listener.bind(address)
            listener.listen(_BACKLOG)
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise listen_error(address[0], address[1], error.strerror) from None
    return listeners


def assign_sockets(listeners: list[socket.socket], count: int) -> list[list[socket.socket]]:
    """Distribution of inherited sockets over `count` workers. Each socket has a worker; with fewer
    sockets than workers, workers share."""
    shares = [listeners[index::count] for index in range(count)]
    return [share or [listeners[index % len(listeners)]] for index, share in enumerate(shares)]


def listen_control(data: Path) -> tuple[socket.socket, Path]:
    """The socket of the control process, for this user's processes only: in `data`, or in a
    temporary folder if `data` is not writable. Raises SettingsError."""
    for folder in (data / "run", None):
        try:
            path = (folder or Path(tempfile.mkdtemp(prefix="fitserve-"))) / "control.sock"
            return listen_at(path, _BACKLOG), path
        except OSError as error:
            reason = error.strerror
    raise SettingsError(
        f"The control process cannot listen in {data} or in a temporary folder: {reason}.",
        hint="Repair the permissions of FITSERVE_DATA_DIR, or set FITSERVE_WORKERS=1.",
    )


def listen_at(path: Path, backlog: int) -> socket.socket:
    """A Unix socket for this user's processes only, replacing an earlier one. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        listener.bind(short_path(path))
        path.chmod(0o600)  # no process can connect before it listens
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def inner_path(control: Path, worker: int) -> Path:
    """The path at which a worker takes requests of the control process."""
    return control.with_name(f"worker-{worker}.sock")


def forget(path: Path) -> None:
    """Remove the path of `listen_control`."""
    with contextlib.suppress(OSError):
        path.unlink()
        if path.parent.name != "run":
            for worker_path in path.parent.glob("worker-*.sock"):
                worker_path.unlink()
            path.parent.rmdir()


def short_path(path: Path) -> str:
    """A name for `path` that fits a Unix socket, even in a long folder. Valid while the process
    lives."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{folder}/{path.name}"
