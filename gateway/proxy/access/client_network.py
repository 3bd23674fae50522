"""The unit in which clients are counted by address: an IPv4 address, or the /64 network of an IPv6
address, which one customer has whole."""

from __future__ import annotations

import ipaddress


def client_network(address: str) -> str:
    """The unit to which `address` belongs. What is no address is a unit of its own."""
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    return str(found.ipv4_mapped or ipaddress.IPv6Address(int(found) >> 64 << 64))
