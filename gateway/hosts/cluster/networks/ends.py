"""The two ends of a measurement between machines: one listens, the other connects and asks.

    key, "c"    the control connection: each "p" is sent back, "u" and "d" begin a transfer
    key, "u"    connections whose bytes go up to the listener, which answers with their rate
    key, "d"    connections whose bytes come down

The listener has an address of the cluster alone, and lives for one measurement. Its key comes to
the other machine over Ray, with the token of the cluster.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import statistics
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

from gateway.domain import Network
from gateway.hosts.cluster.networks.transfer import STREAMS, receive, send

KEY_BYTES = 32
_CONTROL = b"c"
_UP = b"u"
_DOWN = b"d"
_PROBE = b"p"
_RATE = struct.Struct("!d")
# Longer than a transfer: the other machine is gone.
_SILENCE_S = 8.0
_IDENTITY_S = 2.0
_PROBES = 40
_PROBES_S = 1.0


class Listener:
    """The end that waits for a measurement."""

    def __init__(self, address: str) -> None:
        """Listen on the address. Raises OSError."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=2 * STREAMS)
        self._key = secrets.token_bytes(KEY_BYTES)
        self.port: int = self._socket.getsockname()[1]

    @property
    def key(self) -> str:
        return self._key.hex()

    def close(self) -> None:
        with suppress(OSError):
            # A thread that waits for a connection wakes up.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def serve(self) -> None:
        """Answer one measurement. Raises OSError."""
        with closing(self._accept(_CONTROL, 1)[0]) as control:
            while command := control.recv(1):
                if command == _PROBE:
                    control.sendall(command)
                elif command == _UP:
                    rate = receive(self._accept(_UP, STREAMS))
                    control.sendall(_RATE.pack(rate or 0.0))
                elif command == _DOWN:
                    with ExitStack() as stack:
                        streams = self._accept(_DOWN, STREAMS)
                        for stream in streams:
                            stack.enter_context(stream)
                        send(streams)

    def _accept(self, role: bytes, count: int) -> list[socket.socket]:
        """Connections with the key, for one role. Others are closed. Raises OSError."""
        deadline = time.monotonic() + _SILENCE_S
        accepted: list[socket.socket] = []
        try:
            while len(accepted) < count:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                connection, _ = self._socket.accept()
                connection.settimeout(_IDENTITY_S)
                if hmac.compare_digest(_read_identity(connection), self._key + role):
                    _prepare(connection)
                    accepted.append(connection)
                else:
                    connection.close()
        except OSError:
            for connection in accepted:
                connection.close()
            raise
        return accepted


def measure(address: str, port: int, key: str) -> Network:
    """The network to a listener: bytes per second over TCP, of the slower direction, and half of
    the median round trip. Raises OSError."""
    with closing(_connect(address, port, key, _CONTROL)) as control:
        latency_s = statistics.median(_round_trips(control)) / 2
        control.sendall(_UP)
        with _streams(address, port, key, _UP) as streams:
            send(streams)
        (up_rate,) = _RATE.unpack(_read(control, _RATE.size))
        control.sendall(_DOWN)
        with _streams(address, port, key, _DOWN) as streams:
            down_rate = receive(streams)
    rate = min(up_rate, down_rate or 0.0)
    return Network(tcp_bytes_s=rate if rate > 0 else None, latency_s=latency_s)


def _round_trips(control: socket.socket) -> list[float]:
    """Seconds of each round trip of one byte. Raises OSError."""
    begin = time.perf_counter()
    times = list[float]()
    while len(times) < _PROBES and (not times or time.perf_counter() - begin < _PROBES_S):
        sent_at = time.perf_counter()
        control.sendall(_PROBE)
        _read(control, 1)
        times.append(time.perf_counter() - sent_at)
    return times


@contextmanager
def _streams(address: str, port: int, key: str, role: bytes) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(_connect(address, port, key, role)) for _ in range(STREAMS)]


def _connect(address: str, port: int, key: str, role: bytes) -> socket.socket:
    connection = socket.create_connection((address, port), _SILENCE_S)
    _prepare(connection)
    connection.sendall(bytes.fromhex(key) + role)
    return connection


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(_SILENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _read_identity(connection: socket.socket) -> bytes:
    """The first bytes of a connection, or none where the caller sends too few."""
    with suppress(OSError):
        return _read(connection, KEY_BYTES + 1)
    return b""


def _read(connection: socket.socket, size: int) -> bytes:
    """Bytes of this number. Raises OSError."""
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the other machine broke off")
        data += part
    return data
