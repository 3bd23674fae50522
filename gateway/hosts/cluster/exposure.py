"""Servers of Ray and of engines' ranks that answer outside the network of the cluster, as another
machine finds them.

They listen on every interface, so only a firewall keeps others out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from gateway.domain import NodeView
from gateway.hosts.cluster.membership import PORTS, Membership
from gateway.hosts.process.host import ENGINE_PORTS
from gateway.machine import network

_CONNECT_S = 1.0
# The ranks of engines over several machines meet up to this port.
_LAST_PORT = 32_763


async def exposed_servers(views: Iterable[NodeView], membership: Membership) -> Sequence[str]:
    """Machine and `ADDRESS:PORT` of each server of another machine that takes a connection on an
    address other than that of the cluster, on a port of Ray or engines.

    membership: this machine's, whose ports of Ray all machines have. An address that this machine
    has too, such as that of Docker's bridge, leads to this machine's own servers and is left out.
    """
    local_addresses = await asyncio.to_thread(network.addresses)
    head_port = int(membership.head.rpartition(":")[2])
    ray_ports = {head_port, *range(membership.first_port, membership.first_port + PORTS)}
    cluster_ports = {*ray_ports, *range(ENGINE_PORTS.start, _LAST_PORT + 1)}
    servers = []
    for view in (view for view in views if view.name != membership.name):
        known_addresses = {view.address, *local_addresses}
        addresses = [address for address in view.addresses if address not in known_addresses]
        ports = [port for port in view.ports if port in cluster_ports]
        servers += [(view.name, address, port) for address in addresses for port in ports]
    answers = await asyncio.gather(*(_connects(address, port) for _, address, port in servers))
    return [
        f"{name} at {address}:{port}"
        for (name, address, port), connects in zip(servers, answers, strict=True)
        if connects
    ]


async def _connects(address: str, port: int) -> bool:
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(address, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
