"""Interfaces and ports of this machine, as Linux reports them."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915
_LISTENS = "0A"
"""TCP_LISTEN in include/net/tcp_states.h."""


def find_interface(address: str) -> str | None:
    """The interface with this IPv4 address, by name; None: none, or an address of another kind."""
    return next((name for name, number in _interfaces() if number == address), None)


def addresses() -> tuple[str, ...]:
    """The first IPv4 address of each interface but loopback, in order."""
    return tuple(sorted(number for _, number in _interfaces() if not number.startswith("127.")))


def _interfaces() -> list[tuple[str, str]]:
    """Names of interfaces with their first IPv4 addresses."""
    interfaces = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            # An interface without IPv4 has no answer.
            with suppress(OSError):
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                interfaces.append((name, socket.inet_ntoa(answer[20:24])))
    return interfaces


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
