"""Clients are counted by network: a whole IPv6 /64 is one client, however many addresses come from
there."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.access.client_network import client_network

BITS_64 = st.integers(0, 2**64 - 1)


@given(network=BITS_64, number=BITS_64, other_number=BITS_64)
def test_addresses_are_of_one_network_where_their_first_64_bits_are_the_same(
    network: int, number: int, other_number: int
) -> None:
    def unit(high: int, low: int) -> str:
        return client_network(str(ipaddress.IPv6Address(high << 64 | low)))

    if network:  # 0 has the addresses that stand for IPv4
        assert unit(network, number) == unit(network, other_number)
        assert unit(network, number) != unit(network ^ 1 << 63, number)


@pytest.mark.parametrize(
    ("address", "unit"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("::1", "::"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("", ""),
        ("no: address", "no: address"),
    ],
)
def test_an_address_belongs_to_its_network(address: str, unit: str) -> None:
    assert client_network(address) == unit
