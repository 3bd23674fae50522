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
