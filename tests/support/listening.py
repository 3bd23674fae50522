"""The addresses on which processes listen, as Linux reports them."""

from __future__ import annotations

import ipaddress
import struct
from pathlib import Path

LISTENS = "0A"
"""TCP_LISTEN in the tables of /proc/net."""


def listening_addresses(pid: int) -> set[str]:
    """The addresses on which the sockets of a process listen, in its network."""
    sockets = {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
    lines = (
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    )
    return {
        _address(local.partition(":")[0])
        for _, local, _, state, *rest in lines
        if state == LISTENS and f"socket:[{rest[5]}]" in sockets
    }


def _address(digits: str) -> str:
    """The address behind the kernel's digits: 32-bit words in the machine's byte order."""
    words = struct.pack(
        f">{len(digits) // 8}I",
        *struct.unpack(f"={len(digits) // 8}I", bytes.fromhex(digits)),
    )
    return str(ipaddress.ip_address(words))
