"""A connection of the gateway to its own data plane, over a pair of sockets in one process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.proxy.client_connection import ClientConnection


async def open_inner(
    protocol: Callable[[], ClientConnection],
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, ClientConnection]:
    """The streams of a new connection, and its other end. protocol: makes that end. Raises
    OSError where no socket is to be had."""
    loop = asyncio.get_running_loop()
    local_end, remote_end = socket.socketpair()
    for end in (local_end, remote_end):
        end.setblocking(False)
    try:
        _, inner_connection = await loop.connect_accepted_socket(protocol, remote_end)
    except BaseException:
        local_end.close()
        remote_end.close()
        raise
    try:
        reader, writer = await asyncio.open_connection(sock=local_end)
    except BaseException:
        local_end.close()
        inner_connection.transport.close()
        raise
    return reader, writer, inner_connection
