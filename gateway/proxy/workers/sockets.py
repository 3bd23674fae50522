"""The sockets of a gateway with workers: one per worker on the port that clients know, and the
control process's own."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from pathlib import Path

from gateway.errors import SettingsError
from gateway.proxy.limits import hold_little
from gateway.proxy.upstream_connection import watch_peer

_BACKLOG = 2048


def share(bound: socket.socket, count: int) -> list[socket.socket]:
    """`count` listening sockets where `bound` is, which showed that the port is free and is closed.
    Raises SettingsError."""
    family, address = bound.family, bound.getsockname()
    bound.close()
    listeners: list[socket.socket] = []
    try:
        for _ in range(count):
            listener = socket.socket(family, socket.SOCK_STREAM)
            listeners.append(listener)
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                listener.setsockopt(socket.SOL_SOCKET, option, 1)
            watch_peer(listener)
            hold_little(listener)
            listener.bind(address)
            listener.listen(_BACKLOG)
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise SettingsError(
            f"Cannot listen on {address[0]} port {address[1]}: {error.strerror}.",
            hint="Stop what uses it, or set FITSERVE_PORT.",
        ) from None
    return listeners


def spread(listeners: list[socket.socket], count: int) -> list[list[socket.socket]]:
    """The sockets that were opened by somebody else, for `count` workers. Each socket has a worker;
    where there are fewer sockets, workers share one."""
    given = [listeners[index::count] for index in range(count)]
    return [own or [listeners[index % len(listeners)]] for index, own in enumerate(given)]


def listen_control(data: Path) -> tuple[socket.socket, Path]:
    """Where the control process is asked, by this user's processes alone: in `data`, or where that
    cannot be written, in a folder for
    temporary files. Raises SettingsError."""
    for folder in (data / "run", None):
        try:
            path = (folder or Path(tempfile.mkdtemp(prefix="fitserve-"))) / "control.sock"
            return listen_at(path, _BACKLOG), path
        except OSError as error:
            reason = error.strerror
    raise SettingsError(
        f"The control process cannot listen, neither in {data} nor for a while elsewhere:"
        f" {reason}.",
        hint="Repair the permissions of FITSERVE_DATA_DIR, or set FITSERVE_WORKERS=1.",
    )


def listen_at(path: Path, backlog: int) -> socket.socket:
    """A Unix socket for this user's processes alone, in the place of what is there. Raises
    OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        listener.bind(short(path))
        path.chmod(0o600)  # nobody can connect before it listens
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def forget(path: Path) -> None:
    """Of `listen_control`, at the end."""
    with contextlib.suppress(OSError):
        path.unlink()
        if path.parent.name != "run":
            path.parent.rmdir()


def short(path: Path) -> str:
    """A name for `path` that is short enough for a Unix socket, whatever its folder is called. Good
    while the process lives."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{folder}/{path.name}"
