"""Interface to systemd: sockets opened for the service, and notification of readiness.

Source: sd_listen_fds(3) and sd_notify(3); their library is not needed for that.
"""

from __future__ import annotations

import contextlib
import os
import socket

_FIRST_DESCRIPTOR = 3


def opened_sockets() -> list[socket.socket]:
    """The listening sockets that systemd opened for this process. Child processes do not inherit
    them."""
    process = os.environ.pop("LISTEN_PID", "")
    count = os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if process != str(os.getpid()) or not count.isdecimal():
        return []
    sockets = []
    for number in range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + int(count)):
        os.set_inheritable(number, False)
        sockets.append(socket.socket(fileno=number))
    return sockets


def notify(*lines: str) -> None:
    """Notify the service manager, if there is one."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.sendto(
            "\n".join(lines).encode(), "\0" + address[1:] if address.startswith("@") else address
        )
