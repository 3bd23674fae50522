"""The identity in a header of a trusted proxy: oauth2-proxy, Authelia or Tailscale.

request                                     answer
without the header                          no identity
from an untrusted address, with the header  refused
from a trusted address, with the header     the person, unless a browser acts for another page

The address is that of the connection. No other header has a part in the decision.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence

from gateway.errors import BadRequest, Forbidden
from gateway.proxy.access.auth import check_site
from gateway.server.identity.person import Person, make_person

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Headers = Iterable[tuple[bytes, bytes]]
_MAX_GROUPS_BYTES = 16 * 1024


class ProxyHeader:
    """Reads the identity of a request.

    user: lower-case name of the header.
    groups: name of the header of groups; None for none.
    networks: the addresses of the proxy.
    """

    def __init__(self, user: str, groups: str | None, networks: Sequence[Network]) -> None:
        self._user = user.encode()
        self._groups = groups.encode() if groups is not None else None
        self._networks = networks

    def person(self, headers: Headers, address: str) -> Person | None:
        """The person that the proxy names; None: it names none. Raises Forbidden, BadRequest."""
        values = self._values(headers)
        if not values:
            return None
        if not self._trusts(address):
            raise Forbidden(
                "The request names its user in a header, and does not come from the proxy that may"
                " do so.",
                hint="Send a key instead, or add the proxy to FITSERVE_PROXY_ADDRESSES.",
            )
        if not values.get(self._user):
            return None
        groups = values.get(self._groups, b"") if self._groups is not None else b""
        if len(groups) > _MAX_GROUPS_BYTES:
            raise BadRequest(
                f"The header of groups is over {_MAX_GROUPS_BYTES} bytes.",
                hint="Let the proxy send fewer groups.",
            )
        return make_person(_text(values[self._user]), _text(groups).split(","))

    def _values(self, headers: Headers) -> Mapping[bytes, bytes]:
        """The identity headers of a request. Raises BadRequest where one occurs twice."""
        values: dict[bytes, bytes] = {}
        for name, value in headers:
            if name in (self._user, self._groups):
                if name in values:
                    raise BadRequest(
                        f"The request has two {name.decode()} headers.",
                        hint="Let the proxy remove those of its clients.",
                    )
                values[name] = value.strip()
        return values

    def _trusts(self, address: str) -> bool:
        try:
            ip = ipaddress.ip_address(address)
        except ValueError:
            return False
        if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        return any(ip in network for network in self._networks)


def check_page(headers: Headers) -> None:
    """Refuse a browser that acts for a page of another origin, as a proxy adds the identity of its
    user to every request. Raises Forbidden."""
    values = dict(headers)
    site = values.get(b"sec-fetch-site")
    origin = values.get(b"origin")
    if site is not None:
        check_site(site)
    elif origin is not None and origin.partition(b"://")[2].lower() != (
        values.get(b"host", b"").lower()
    ):
        raise Forbidden(
            "The page of another origin may not act for the user of a proxy.",
            hint="Call with a key instead.",
        )


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise BadRequest(
            "The name of the user is not UTF-8.", hint="The operator corrects the proxy."
        ) from None
