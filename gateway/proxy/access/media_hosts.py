"""The hosts that media URLs of requests may name, because an engine would fetch them.

An engine stands inside the network, so through the engine a client could reach places that are
closed to the client: other machines, the loopback interface, the metadata service of a cloud.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase

from gateway.errors import Busy
from gateway.proxy.bodies import media_urls

# The entry of the setting for every host whose addresses are all public.
PUBLIC_HOSTS = "public"
_NAME = re.compile(r"(?!-)[a-z0-9-]{1,63}(?:\.[a-z0-9_-]{1,63})*\.?")
# resolvers of C read a last label of this kind as a number of an IPv4 address
_NUMERIC_LABEL = re.compile(r"(?:\d+|0x[0-9a-f]*)")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Azure serves the settings of a virtual machine at this address.
# Source: learn.microsoft.com, "What is IP address 168.63.129.16?".
_PLATFORM = ipaddress.ip_address("168.63.129.16")
_ANY_PORT = 9
_VERDICT_LIFE_S = 60.0
_MAX_VERDICTS = 1024
_MAX_LOOKUPS = 64
_LOOKUP_TIMEOUT_S = 5.0

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class MediaHosts:
    """Answers whether a host may be fetched from.

    allowed_names: names, patterns with `*`, addresses, and `public`.
    """

    def __init__(self, allowed_names: Collection[str]) -> None:
        self._patterns = tuple(
            pattern.lower() for pattern in allowed_names if pattern != PUBLIC_HOSTS
        )
        self._has_public = PUBLIC_HOSTS in allowed_names
        self._verdicts: dict[str, tuple[float, bool]] = {}
        """The end of an answer's validity and the answer, by name; the oldest first."""
        self._lookups: dict[str, asyncio.Future[bool]] = {}
        self._threads: ThreadPoolExecutor | None = None

    def verdict(self, host: str, now: float) -> bool | None:
        """Whether the host is allowed; None: its name has to be resolved."""
        host = host.lower()
        if any(fnmatchcase(host.rstrip("."), pattern) for pattern in self._patterns):
            return True
        if not self._has_public:
            return False
        try:
            return is_foreign(ipaddress.ip_address(host))
        except ValueError:
            pass
        labels = host.rstrip(".").split(".")
        if not _NAME.fullmatch(host) or _NUMERIC_LABEL.fullmatch(labels[-1]) or len(labels) < 2:
            return False
        valid_until, answer = self._verdicts.get(host, (0.0, False))
        return answer if valid_until > now else None

    def unresolved_hosts(self, body: bytes | bytearray) -> list[str]:
        """The hosts of a body's media whose names have to be resolved. Raises BadRequest."""
        now = -1.0
        unknown_hosts = []
        for host in media_urls.hosts(body):
            now = asyncio.get_running_loop().time() if now < 0 else now
            is_allowed = self.verdict(host, now)
            if is_allowed is None:
                unknown_hosts.append(host)
            elif not is_allowed:
                raise media_urls.host_error(host)
        return unknown_hosts

    async def check(self, hosts: Iterable[str]) -> None:
        """Resolve the hosts. Raises BadRequest, Busy."""
        for host in hosts:
            if not await self._is_public(host):
                raise media_urls.host_error(host)

    async def _is_public(self, host: str) -> bool:
        """Whether all addresses of a name are public. Raises Busy."""
        host = host.lower()
        loop = asyncio.get_running_loop()
        if host not in self._lookups:
            if len(self._lookups) >= _MAX_LOOKUPS:
                raise Busy(
                    "Too many names of media hosts are being resolved.",
                    hint="Try again in a few seconds, or send the media as data: URLs.",
                )
            self._lookups[host] = loop.create_task(self._has_public_addresses(host))
        return await asyncio.shield(self._lookups[host])

    async def _has_public_addresses(self, host: str) -> bool:
        loop = asyncio.get_running_loop()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(4, "media-hosts")
        try:
            async with asyncio.timeout(_LOOKUP_TIMEOUT_S):
                addresses = await loop.run_in_executor(self._threads, resolve_addresses, host)
            answer = bool(addresses) and all(map(is_foreign, addresses))
        except (OSError, UnicodeError, TimeoutError):
            answer = False
        finally:
            del self._lookups[host]
        self._verdicts.pop(host, None)
        while len(self._verdicts) >= _MAX_VERDICTS:
            del self._verdicts[next(iter(self._verdicts))]
        self._verdicts[host] = (loop.time() + _VERDICT_LIFE_S, answer)
        return answer


def resolve_addresses(host: str) -> list[_Address]:
    """The addresses of a name. Blocks. Raises OSError, UnicodeError."""
    addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [ipaddress.ip_address(str(address[4][0]).partition("%")[0]) for address in addresses]


def is_foreign(address: _Address) -> bool:
    """Whether an address is public, and none of this machine. Behind a public address of its own a
    machine has services that its firewall keeps from others."""
    return is_public(address) and not _is_own(address)


def _is_own(address: _Address) -> bool:
    """Whether packets to the address stay on this machine. None is sent."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as end:
            end.connect((str(address), _ANY_PORT))
            return ipaddress.ip_address(end.getsockname()[0].partition("%")[0]) == address
    except OSError:  # no way leads there
        return False


def is_public(address: _Address) -> bool:
    """Whether an address is on the public internet, the IPv4 address inside an IPv6 one too."""
    if isinstance(address, ipaddress.IPv6Address):
        teredo = address.teredo
        inner_address = address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None)
        if address in _NAT64:
            inner_address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner_address is not None:
            return is_public(inner_address)
        if address.is_site_local:
            return False
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and address != _PLATFORM
    )
