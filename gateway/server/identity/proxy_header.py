"""The identity in a header of a trusted proxy: oauth2-proxy, Authelia, authentik or Tailscale.

request                                     answer
without the header                          no identity
from an untrusted address, with the header  refused
from a trusted address, with the header     the person, unless a browser acts for another page

The address is that of the connection, whatever client a proxy states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gateway.errors import BadRequest, Forbidden
from gateway.proxy.access.auth import check_site
from gateway.proxy.access.trusted_proxies import Network, TrustedProxies
from gateway.server.identity.person import Person, make_person

Headers = Iterable[tuple[bytes, bytes]]
_MAX_GROUPS_BYTES = 16 * 1024


class ProxyHeader:
    """Reads the identity of a request.

    user: lower-case name of the header.
    groups: name of the header of groups; None for none.
    networks: the addresses of the proxy.
    separator: the character between groups.
    """

    def __init__(
        self, user: str, groups: str | None, networks: Sequence[Network], separator: str = ","
    ) -> None:
        self._separator = separator
        self._user = user.encode()
        self._groups = groups.encode() if groups is not None else None
        self._proxies = TrustedProxies(networks)

    def person(self, headers: Headers, address: str) -> Person | None:
        """The person that the proxy names; None: it names none. Raises Forbidden, BadRequest."""
        values = self._values(headers)
        if not values:
            return None
        if not self._proxies.trusts(address):
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
        return make_person(_text(values[self._user]), _text(groups).split(self._separator))

    def trusts(self, address: str) -> bool:
        """Whether the proxy has that address."""
        return self._proxies.trusts(address)

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


def check_page(headers: Headers, *, is_from_proxy: bool = False) -> None:
    """Refuse a browser that acts for a page of another origin, as a proxy adds the identity of its
    user to every request. Raises Forbidden.

    is_from_proxy: whether a trusted proxy sent the request. Such a proxy may have replaced the Host
        header, and states the browser's in X-Forwarded-Host.
    """
    values = dict(headers)
    site = values.get(b"sec-fetch-site")
    origin = values.get(b"origin")
    hosts = {values.get(b"host", b"").lower()}
    if is_from_proxy and b"x-forwarded-host" in values:
        hosts.add(values[b"x-forwarded-host"].rpartition(b",")[2].strip().lower())
    if site is not None:
        check_site(site)
    elif origin is not None and origin.partition(b"://")[2].lower() not in hosts:
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
