"""Servers of Ray outside the network of the cluster, on the addresses of loopback."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

import pytest

from gateway.domain import NodeView
from gateway.hosts.cluster.exposure import exposed_servers
from gateway.hosts.cluster.membership import Membership
from gateway.machine import network
from gateway.profiles.profiles import Profiles

pytestmark = pytest.mark.anyio


def view_of(port: int, *addresses: str) -> NodeView:
    """The machine `two`, which listens on two ports."""
    return NodeView(
        name="two",
        version="1",
        address="127.0.0.3",
        addresses=addresses,
        ports=(port, port + 1),
        hardware=Profiles().hardware("cpu"),
        lease_s=300,
    )


def member(port: int) -> Membership:
    return Membership(
        name="one",
        role="head",
        head=f"127.0.0.1:{port}",
        address="127.0.0.1",
        token_file=Path("/token"),
    )


async def test_an_address_that_each_machine_has_leads_to_no_other_machine() -> None:
    """Docker's bridge has the same address on most machines."""
    address = network.addresses()[0]
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        view = view_of(port, address, "127.0.0.2")
        assert await exposed_servers([view], member(port)) == [f"two at 127.0.0.2:{port}"]


async def test_a_port_of_engines_on_another_address_is_named() -> None:
    with socket.create_server(("127.0.0.2", 0)) as head, socket.socket() as ranks:
        port = free_port_of(ranks, "127.0.0.2")
        view = view_of(port, "127.0.0.2")
        membership = member(head.getsockname()[1])
        assert await exposed_servers([view], membership) == [f"two at 127.0.0.2:{port}"]


def free_port_of(listener: socket.socket, address: str) -> int:
    """Listen on a free port where ranks of engines meet."""
    for port in range(29_600, 32_764):
        with suppress(OSError):
            listener.bind((address, port))
            listener.listen()
            return port
    raise AssertionError("no port is free")


async def test_servers_on_other_addresses_of_other_machines_are_named() -> None:
    with socket.create_server(("127.0.0.2", 0)) as server:
        port = server.getsockname()[1]
        # The machine says that it listens on both, and a firewall may stand before one.
        view = view_of(port, "127.0.0.2", "127.0.0.3", "127.0.0.4")
        membership = member(port)
        assert await exposed_servers([view], membership) == [f"two at 127.0.0.2:{port}"]
        # A machine cannot tell by itself which of its ports others reach.
        local = membership.evolve(name="two")
        assert await exposed_servers([view], local) == []
        # On the network of the cluster it has to answer.
        assert await exposed_servers([view.evolve(address="127.0.0.2")], membership) == []
