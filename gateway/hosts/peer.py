"""The process at the other end of a Unix socket."""

from __future__ import annotations

import socket
import struct

_CREDENTIALS = struct.Struct("3i")


def peer_user(connection: socket.socket) -> int:
    """The id of the user of the process at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(credentials)[1]
    return user
