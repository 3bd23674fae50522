"""Interfaces, their traffic, and ports of this machine, as Linux reports them."""

from __future__ import annotations

import fcntl
import socket
import struct
from array import array
from contextlib import suppress
from pathlib import Path

_SIOCGIFCONF = 0x8912
# struct ifreq of netdevice(7): a name, and an address behind its family and port.
_ROW = "16s4x4s"
_ROW_BYTES = 24 + 2 * struct.calcsize("P")
_FIRST_ANSWER_BYTES = 4096
_LISTENS = "0A"
"""TCP_LISTEN in include/net/tcp_states.h."""


def find_interface(address: str) -> str | None:
    """The interface with this IPv4 address, by name; None: none, or an address of another kind."""
    return next((name for name, number in _interfaces() if number == address), None)


def addresses() -> tuple[str, ...]:
    """The IPv4 addresses of all interfaces but loopback, in order."""
    return tuple(sorted(number for _, number in _interfaces() if not number.startswith("127.")))


def _interfaces() -> list[tuple[str, str]]:
    """Names of interfaces with their IPv4 addresses, of which each may have several."""
    size = _FIRST_ANSWER_BYTES
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        while True:
            rows = array("B", bytes(size))
            request = struct.pack("iP", size, rows.buffer_info()[0])
            answer = fcntl.ioctl(probe, _SIOCGIFCONF, request)
            (used_size,) = struct.unpack_from("i", answer)
            # Linux leaves out rows without room.
            if used_size + _ROW_BYTES <= size:
                break
            size *= 2
    table = rows.tobytes()[:used_size]
    return [
        # The label of a further address has the name before a colon.
        (name.rstrip(b"\0").decode().partition(":")[0], socket.inet_ntoa(address))
        for name, address in (
            struct.unpack_from(_ROW, table, at) for at in range(0, used_size, _ROW_BYTES)
        )
    ]


def listening_ports() -> tuple[int, ...]:
    """The TCP ports of this network namespace on which programs listen, in order."""
    ports = set()
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                _, local_address, _, state, *_ = line.split()
                if state == _LISTENS:
                    ports.add(int(local_address.rpartition(":")[2], 16))
    return tuple(sorted(ports))


def traffic_bytes(interface: str) -> int | None:
    """The bytes that an interface has received and sent; None: Linux does not count them."""
    with suppress(OSError):
        for line in Path("/proc/net/dev").read_text().splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == interface and counts:
                fields = counts.split()
                # The columns of Linux: eight of received packets, then eight of sent ones.
                return int(fields[0]) + int(fields[8])
    return None
