"""The network that stands for one client: an IPv4 address, or the /64 network of an IPv6
address."""

from __future__ import annotations

import ipaddress


def client_network(address: str) -> str:
    """The client network of `address`. Text that is not an address is a network of its own."""
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    return str(parsed.ipv4_mapped or ipaddress.IPv6Address(int(parsed) >> 64 << 64))
