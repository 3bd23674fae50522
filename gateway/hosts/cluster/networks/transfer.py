"""Bytes over several connections for a limited time, and the rate at which they arrive.

The receiver decides the end: bytes that a slow network still holds are thrown away. Sockets block,
and each has a thread, as one thread does not fill a fast network.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

STREAMS = 4
"""Connections of a transfer. NCCL takes several too."""
_CHUNK_BYTES = 256 * 1024
_READ_S = 1.0
_MAX_BYTES = 2 * 1024**3
# The receiver ends the transfer earlier, unless it has died.
_SEND_S = 5.0
# Receipts within this time count as one.
_STEP_S = 0.001
_RESET = struct.pack("ii", 1, 0)


class Receipt(NamedTuple):
    """Bytes that arrived. at: seconds of a clock that never goes back."""

    at: float
    size: int


def send(connections: Sequence[socket.socket]) -> None:
    """Send over all connections until the receiver closes them."""
    with ThreadPoolExecutor(len(connections)) as threads:
        list(threads.map(_send_over, connections))


def _send_over(connection: socket.socket) -> None:
    # A tunnel may compress equal bytes.
    chunk = os.urandom(_CHUNK_BYTES)
    deadline = time.monotonic() + _SEND_S
    with suppress(OSError):
        while time.monotonic() < deadline:
            connection.send(chunk)


def receive(connections: Sequence[socket.socket]) -> float | None:
    """The bytes per second that arrive over all connections, which are closed then. None: too few
    arrive."""
    with ThreadPoolExecutor(len(connections)) as threads:
        parts = list(threads.map(_receive_over, connections))
    return received_rate([receipt for receipts in parts for receipt in receipts])


def _receive_over(connection: socket.socket) -> list[Receipt]:
    buffer = bytearray(_CHUNK_BYTES)
    receipts: list[Receipt] = []
    total_bytes = 0
    with suppress(OSError):
        while size := connection.recv_into(buffer):
            now = time.monotonic()
            total_bytes = total_bytes + size
            if receipts and now - receipts[-1].at < _STEP_S:
                receipts[-1] = Receipt(receipts[-1].at, receipts[-1].size + size)
            else:
                receipts.append(Receipt(now, size))
            if now - receipts[0].at >= _READ_S or total_bytes >= _MAX_BYTES // STREAMS:
                break
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    connection.close()
    return receipts


def received_rate(receipts: Sequence[Receipt]) -> float | None:
    """Bytes per second of the later half of the time: connections begin slowly, and shapers let a
    first burst through. None: there is no such time."""
    if not receipts:
        return None
    first_at = min(receipt.at for receipt in receipts)
    last_at = max(receipt.at for receipt in receipts)
    middle = (first_at + last_at) / 2
    if last_at == middle:
        return None
    return sum(receipt.size for receipt in receipts if receipt.at > middle) / (last_at - middle)
