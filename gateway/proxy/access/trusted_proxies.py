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
        try:
            ip = ipaddress.ip_address(address)
        except ValueError:
            return False
        if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        return any(ip in network for network in self._networks)

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
    try:
        ip = ipaddress.ip_address(match[1] or match[2] if match else text)
    except ValueError:
        return None
    if isinstance(ip, ipaddress.IPv6Address):
        # One address has one form, and a zone is one of the proxy's machine.
        return None if ip.scope_id is not None else str(ip.ipv4_mapped or ip)
    return str(ip)
