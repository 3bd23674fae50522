"""The address of a client that a trusted proxy states, and attempts to state one from elsewhere."""

from __future__ import annotations

import pytest

from gateway.proxy.access.trusted_proxies import TrustedProxies
from gateway.proxy.limits import ConnectionLimiter, Limits

PROXIES = TrustedProxies.parse(["10.0.0.5", "10.1.0.0/16", "fd00::/64"], "X-Forwarded-For")


def client(address: str, *values: str) -> str:
    headers = [(b"x-forwarded-for", value.encode("latin-1")) for value in values]
    return PROXIES.client_address([(b"accept", b"*/*"), *headers], address)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["192.0.2.1"], "192.0.2.1"),
        (["192.0.2.1:4711"], "192.0.2.1"),
        (["2001:db8::0:1"], "2001:db8::1"),
        (["[2001:db8::1]:4711"], "2001:db8::1"),
        (["192.0.2.9, 192.0.2.1"], "192.0.2.1"),
        (["192.0.2.9", "192.0.2.1"], "192.0.2.1"),
        (["192.0.2.1, 10.1.2.3"], "192.0.2.1"),
        (["192.0.2.1, 10.1.2.3,fd00::7"], "192.0.2.1"),
    ],
)
def test_the_last_address_before_trusted_ones_is_that_of_the_client(
    values: list[str], expected: str
) -> None:
    assert client("10.0.0.5", *values) == expected


@pytest.mark.parametrize("address", ["10.0.0.6", "192.0.2.7", "127.0.0.1", "::1", "", "unix"])
def test_no_other_address_states_a_client(address: str) -> None:
    assert client(address, "192.0.2.1") == address


@pytest.mark.parametrize(
    "values",
    [
        [],
        [""],
        ["unknown"],
        ["192.0.2.1, _hidden"],
        ["192.0.2.1, "],
        ["192.0.2.300"],
        ["fe80::1%zone"],
        ["\xe9"],
        ["10.1.2.3"],
        ["192.0.2.1, " + ", ".join(["10.1.2.3"] * 40)],
    ],
    ids=str,
)
def test_a_text_without_a_client_counts_for_the_proxy(values: list[str]) -> None:
    assert client("10.0.0.5", *values) == "10.0.0.5"


def test_a_mapped_address_has_the_form_of_its_own_kind() -> None:
    assert client("10.0.0.5", "::ffff:192.0.2.1") == "192.0.2.1"


def test_entries_that_a_client_writes_in_front_change_nothing() -> None:
    addresses = {client("10.0.0.5", f"198.51.100.{number}, 192.0.2.1") for number in range(9)}
    assert addresses == {"192.0.2.1"}


def test_no_header_counts_without_the_setting() -> None:
    proxies = TrustedProxies.parse(["10.0.0.5"])
    assert proxies.client_address([(b"x-forwarded-for", b"192.0.2.1")], "10.0.0.5") == "10.0.0.5"


def test_a_trusted_proxy_has_connections_for_many_clients() -> None:
    limits = Limits(connections=7, connections_per_address=2, proxy_networks=("10.0.0.5",))
    limiter = ConnectionLimiter(limits)
    assert [limiter.admit("10.0.0.6") for _ in range(3)] == ["in", "in", "refused"]
    assert [limiter.admit("10.0.0.5") for _ in range(5)] == ["in"] * 5
