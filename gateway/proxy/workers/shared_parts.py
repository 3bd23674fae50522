"""The parts that a gateway shares with its worker processes."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import NamedTuple

from gateway.proxy.shared_memory import SharedMemory


class SharedParts(NamedTuple):
    """Memory and sockets of the control process and its workers.

    listeners: the listening sockets of each worker.
    control: path of the socket at which the control process answers them.
    """

    memory: SharedMemory
    listeners: list[list[socket.socket]]
    control: Path
