"""Connections are counted by client, and each is counted off again."""

from __future__ import annotations

import asyncio

import pytest

from gateway.serve.proxy.limits import STALL_S, ConnectionLimiter, Limits, Stall, has_left


@pytest.mark.parametrize(
    ("addresses", "other"),
    [
        ([f"2001:db8::{number:x}:1" for number in range(4)], "2001:db8:0:1::1"),
        (["10.0.0.1", "::ffff:10.0.0.1", "10.0.0.1", "::ffff:10.0.0.1"], "10.0.0.2"),
    ],
)
def test_connections_of_one_client_are_counted_together_and_off_again(addresses: list[str], other: str) -> None:
    limiter = ConnectionLimiter(Limits(connections_per_address=3))
    for _ in range(2):
        assert [limiter.admit(address) for address in addresses] == [True, True, True, False]
        assert limiter.admit(other)
        for address in (*addresses, other):
            limiter.left(address)
    # A client that has left leaves nothing behind.
    assert not limiter._of
    assert limiter._total == 0


def test_only_some_of_a_crowd_hear_why_they_are_refused() -> None:
    """Each takes a file until its client has left, and the engines need files too."""
    limiter = ConnectionLimiter(Limits(connections=16))
    answered = [limiter.admit("10.0.0.1") or (limiter.flooded() and "cut") or "told" for _ in range(100)]
    assert answered == [True] * 16 + ["told"] * 3 + ["cut"] * 81


def test_a_connection_whose_socket_is_gone_is_no_error() -> None:
    """uvloop: of a connection through TLS the socket is gone before the protocol hears that the connection is lost."""

    class Lost(asyncio.Transport):
        def get_write_buffer_size(self) -> int:
            return 1

    assert not has_left(Lost())
    assert not Stall(Lost(), 0.0).over(2 * STALL_S)
