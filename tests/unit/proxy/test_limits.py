"""Connections are counted by client, and each is counted off again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from gateway.proxy.limits import STALL_S, ClientProgress, ConnectionLimiter, Limits, has_peer_closed


@pytest.mark.parametrize(
    ("addresses", "other_address"),
    [
        ([f"2001:db8::{number:x}:1" for number in range(4)], "2001:db8:0:1::1"),
        (["10.0.0.1", "::ffff:10.0.0.1", "10.0.0.1", "::ffff:10.0.0.1"], "10.0.0.2"),
    ],
)
def test_connections_of_one_client_are_counted_together_and_off_again(
    addresses: list[str], other_address: str
) -> None:
    limiter = ConnectionLimiter(Limits(connections_per_address=3))
    for _ in range(2):
        places = [limiter.admit(address) for address in addresses]
        assert places == ["in", "in", "in", "refused"]
        assert limiter.admit(other_address) == "in"
        for address, place in zip((*addresses, other_address), (*places, "in"), strict=True):
            limiter.release(address, place)
    # A client that has left leaves nothing behind.
    assert not limiter._by_network
    assert (limiter.admitted_count, limiter._refused_count) == (0, 0)


def test_only_some_of_a_crowd_hear_why_they_are_refused() -> None:
    """Each takes a file until its client has left, and the engines need files too."""
    limiter = ConnectionLimiter(Limits(connections=16))
    assert [limiter.admit("10.0.0.1") for _ in range(100)] == ["in"] * 16 + ["refused"] * 3 + [
        "out"
    ] * 81


def test_a_refused_client_takes_no_place_of_others() -> None:
    limiter = ConnectionLimiter(Limits(connections=16, connections_per_address=4))
    assert [limiter.admit("10.0.0.1") for _ in range(100)] == ["in"] * 4 + ["refused"] * 3 + [
        "out"
    ] * 93
    assert [limiter.admit(f"10.0.1.{number}") for number in range(12)] == ["in"] * 12


def test_a_connection_whose_socket_is_gone_is_no_error() -> None:
    """uvloop closes the socket of a TLS connection before the protocol hears that the
    connection is lost."""

    class Lost(asyncio.Transport):
        def get_write_buffer_size(self) -> int:
            return 1

    assert not has_peer_closed(Lost())
    assert not ClientProgress(Lost(), 0.0).is_over(2 * STALL_S)


class Holder(asyncio.Transport):
    """A transport of a socket that nobody reads."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__({"socket": connection})

    def get_write_buffer_size(self) -> int:
        return 1


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return client, server.accept()[0]


@pytest.mark.parametrize("pair", [tcp_pair, socket.socketpair], ids=["client", "twin"])
def test_the_limits_hold_for_each_kind_of_connection(
    pair: Callable[[], tuple[socket.socket, socket.socket]],
) -> None:
    """A request of Ollama's API has a twin on a pair of sockets, which knows no options of TCP."""
    peer, server_end = pair()
    with server_end, peer:
        transport = Holder(server_end)
        assert not has_peer_closed(transport)
        peer.sendall(b"unread")
        assert not has_peer_closed(transport)
        stall = ClientProgress(transport, 0.0)
        assert not stall.is_over(STALL_S)
        assert stall.is_over(2 * STALL_S + 1)
        peer.close()
        assert has_peer_closed(transport)
