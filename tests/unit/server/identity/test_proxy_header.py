"""The identity in the header of a trusted proxy, and attempts to write it from elsewhere."""

from __future__ import annotations

from ipaddress import ip_network

import pytest

from gateway.errors import BadRequest, Forbidden
from gateway.server.identity.person import Person
from gateway.server.identity.proxy_header import ProxyHeader, check_page

NETWORKS = [ip_network("10.0.0.5"), ip_network("fd00::/64")]
PROXY = ProxyHeader("remote-user", "remote-groups", NETWORKS)
ANN = [(b"remote-user", b"ann@example.org"), (b"remote-groups", b"ops, staff,")]


@pytest.mark.parametrize("address", ["10.0.0.5", "::ffff:10.0.0.5", "fd00::77"])
def test_a_trusted_address_names_a_user_with_groups(address: str) -> None:
    person = PROXY.person([*ANN, (b"accept", b"*/*")], address)
    assert person == Person("ann@example.org", frozenset({"ops", "staff"}))


@pytest.mark.parametrize(
    "address", ["10.0.0.6", "127.0.0.1", "::1", "", "10.0.0.5.evil", "nonsense"]
)
@pytest.mark.parametrize("headers", [ANN, ANN[:1], ANN[1:], [(b"remote-user", b"")]])
def test_an_untrusted_address_cannot_name_a_user(
    address: str, headers: list[tuple[bytes, bytes]]
) -> None:
    forwarded = [(b"x-forwarded-for", b"10.0.0.5"), (b"x-real-ip", b"10.0.0.5")]
    with pytest.raises(Forbidden, match="FITSERVE_PROXY_ADDRESSES"):
        PROXY.person([*headers, *forwarded], address)


def test_a_request_without_the_header_has_no_identity() -> None:
    assert PROXY.person([(b"accept", b"*/*")], "10.0.0.6") is None
    assert PROXY.person([(b"remote-user", b" ")], "10.0.0.5") is None
    assert PROXY.person(ANN[1:], "10.0.0.5") is None


@pytest.mark.parametrize("number", [0, 1])
def test_a_header_that_occurs_twice_is_refused(number: int) -> None:
    with pytest.raises(BadRequest, match="two"):
        PROXY.person([*ANN, ANN[number]], "10.0.0.5")


@pytest.mark.parametrize("name", [b"a\x01b", b"\xff", b"x" * 201, "a\u202eb".encode()])
def test_a_name_that_no_list_can_show_is_refused(name: bytes) -> None:
    with pytest.raises(BadRequest):
        PROXY.person([(b"remote-user", name)], "10.0.0.5")


def test_groups_are_separated_as_the_proxy_does() -> None:
    """authentik writes `|` between groups, and a name of a group may have a comma."""
    groups = (b"x-authentik-groups", b"ops|staff, night")
    headers = [(b"x-authentik-username", b"ann"), groups]
    proxy = ProxyHeader("x-authentik-username", "x-authentik-groups", NETWORKS, "|")
    assert proxy.person(headers, "10.0.0.5") == Person("ann", frozenset({"ops", "staff, night"}))


@pytest.mark.parametrize(
    ("names", "headers", "expected"),
    [
        (
            ("x-forwarded-email", "x-forwarded-groups"),
            {
                "x-forwarded-user": "3f2a",
                "x-forwarded-email": "ann@example.org",
                "x-forwarded-preferred-username": "ann",
                "x-forwarded-groups": "/ops,role:admin,role:gw:user",
            },
            Person("ann@example.org", frozenset({"/ops", "role:admin", "role:gw:user"})),
        ),
        (
            ("remote-user", "remote-groups"),
            {
                "remote-user": "ann",
                "remote-groups": "ops,staff",
                "remote-name": "Ann",
                "remote-email": "ann@example.org",
            },
            Person("ann", frozenset({"ops", "staff"})),
        ),
        (
            ("tailscale-user-login", None),
            {
                "tailscale-user-login": "ann@example.org",
                "tailscale-user-name": "=?utf-8?q?Ann_=C3=85?=",
                "tailscale-user-profile-pic": "https://example.org/ann",
            },
            Person("ann@example.org"),
        ),
    ],
    ids=["oauth2-proxy with Keycloak", "Authelia", "Tailscale"],
)
def test_the_headers_of_known_proxies_name_a_user(
    names: tuple[str, str | None], headers: dict[str, str], expected: Person
) -> None:
    raw_headers = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert ProxyHeader(*names, NETWORKS).person(raw_headers, "10.0.0.5") == expected


def test_groups_count_only_with_a_header_of_their_own() -> None:
    plain = ProxyHeader("remote-user", None, NETWORKS)
    assert plain.person(ANN, "10.0.0.5") == Person("ann@example.org")


@pytest.mark.parametrize(
    ("headers", "is_allowed"),
    [
        ({}, True),
        ({b"sec-fetch-site": b"same-origin"}, True),
        ({b"sec-fetch-site": b"none"}, True),
        ({b"sec-fetch-site": b"cross-site"}, False),
        ({b"sec-fetch-site": b"same-site"}, False),
        ({b"origin": b"https://gw.example", b"host": b"gw.example"}, True),
        ({b"origin": b"https://evil.example", b"host": b"gw.example"}, False),
        ({b"origin": b"null", b"host": b"gw.example"}, False),
        ({b"origin": b"https://x", b"host": b"y", b"sec-fetch-site": b"same-origin"}, True),
    ],
)
def test_only_the_own_page_acts_for_the_user(headers: dict[bytes, bytes], is_allowed: bool) -> None:
    if is_allowed:
        check_page(headers.items())
    else:
        with pytest.raises(Forbidden):
            check_page(headers.items())


@pytest.mark.parametrize(
    ("forwarded_host", "is_from_proxy", "is_allowed"),
    [
        (b"gw.example", True, True),
        (b"GW.example", True, True),
        (b"evil.example, gw.example", True, True),
        (b"gw.example, inner.example", True, False),
        (b"gw.example", False, False),
    ],
)
def test_a_proxy_may_replace_the_host_and_state_it(
    forwarded_host: bytes, is_from_proxy: bool, is_allowed: bool
) -> None:
    headers = [
        (b"origin", b"https://gw.example"),
        (b"host", b"10.0.0.7:8080"),
        (b"x-forwarded-host", forwarded_host),
    ]
    if is_allowed:
        check_page(headers, is_from_proxy=is_from_proxy)
    else:
        with pytest.raises(Forbidden):
            check_page(headers, is_from_proxy=is_from_proxy)
