"""The addresses of trusted proxies, and the address of the client that such a proxy states.

A proxy adds its peer at the end of the header, and everything before may come from the client. So
entries are read from the end, past those of other trusted proxies. From any other address the
header means nothing.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
# More proxies in a row are not looked through.
_MAX_PROXIES = 16
# An address with a port: `192.0.2.1:80`, `[2001:db8::1]:80`, or `[2001:db8::1]`.
_ADDRESS_AND_PORT = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+))(?::\d{1,5})?")


class TrustedProxies:
    """The trusted proxies.

    networks: their addresses.
    client_header: lower-case name of the header with the client's address; empty: none.
    """

    def __init__(self, networks: Sequence[Network], client_header: str = "") -> None:
        self._networks = networks
        self._client_header = client_header.lower().encode()

    @classmethod
    def parse(cls, networks: Iterable[str], client_header: str = "") -> TrustedProxies:
        parsed = [ipaddress.ip_network(text, strict=False) for text in networks]
        return cls(parsed, client_header)

    def trusts(self, address: str) -> bool:
        """Whether a proxy has that address."""
        if not self._networks:
            return False
        ip = _parse_ip(address)
        return ip is not None and any(ip in network for network in self._networks)

    def client_address(self, headers: Iterable[tuple[bytes, bytes]], address: str) -> str:
        """The address of the client of a request; that of the connection where no trusted proxy
        states another.

        address: that of the connection.
        """
        if not self._client_header or not self.trusts(address):
            return address
        lines = [value for name, value in headers if name == self._client_header]
        entries = b",".join(lines).rsplit(b",", _MAX_PROXIES)[-_MAX_PROXIES:]
        for entry in reversed(entries):
            client = _parse_address(entry)
            if client is None:
                return address
            if not self.trusts(client):
                return client
        return address


def _parse_address(entry: bytes) -> str | None:
    """The address of an entry, in its one form; None for another text."""
    text = entry.strip().decode("latin-1")
    match = _ADDRESS_AND_PORT.fullmatch(text)
    ip = _parse_ip(match[1] or match[2] if match else text)
    # A zone is a network card of the proxy.
    return None if ip is None or "%" in text else str(ip)


def _parse_ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address, a mapped one as IPv4; None for another text."""
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped_ip = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped_ip or ip
