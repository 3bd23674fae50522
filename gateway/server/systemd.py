"""What systemd and a service tell each other: sockets that it opened for the service, and when the
service is ready.

Source: sd_listen_fds(3) and sd_notify(3); their library is not needed for that.
"""

from __future__ import annotations

import contextlib
import os
import socket

_FIRST = 3


def opened() -> list[socket.socket]:
    """The listening sockets that systemd has opened for this process. No other process takes them
    for its own afterwards."""
    process, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if process != str(os.getpid()) or not count.isdecimal():
        return []
    found = []
    for number in range(_FIRST, _FIRST + int(count)):
        os.set_inheritable(number, False)
        found.append(socket.socket(fileno=number))
    return found


def notify(*lines: str) -> None:
    """Tell the service manager, where one listens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.sendto(
            "\n".join(lines).encode(), "\0" + address[1:] if address.startswith("@") else address
        )
