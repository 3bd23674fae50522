"""Limits on a client around its requests: number of connections, speed, size of a head.

    while                                          at most             then
    a new connection has sent nothing              FIRST_BYTE_S        closed
    the head of a request comes in                 HEAD_S              408, closed
    the head grows                                 HEAD_BYTES and      431, closed
                                                   HEADER_LINES
    a body comes in                                BODY_S, and 1 s for 408, closed
                                                   MIN_BYTES_S each
    a body comes in, wrapped in far more bytes     max_wire_bytes      400, closed
    trailers come in                               HEADER_LINES        400, closed
    a read of a chunked body or a head             READ_BYTES          others are read first
    the client takes no byte of its answer         STALL_S             closed
    the connection is kept, without a request      Limits.keep_alive_s closed
    the rest of a refused body is discarded        LINGER_S in all     closed
    connections are refused, besides those kept    refusal_capacity    closed without a refusal
    a TLS handshake goes on                        tls.HANDSHAKE_S     closed

While a body waits for memory, others have less time (`body_budget.py`). No deadline runs while the
gateway does not read.

`DataPlane` checks all connections twice a second: one timer for all costs less than a timer for
each connection.
"""

from __future__ import annotations

import fcntl
import re
import select
import socket
import struct
import termios
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gateway.errors import BadRequest, HeadTooLarge
from gateway.proxy.access import priority
from gateway.proxy.access.client_network import client_network
from gateway.proxy.access.trusted_proxies import TrustedProxies

if TYPE_CHECKING:
    import asyncio

FIRST_BYTE_S = 10.0
HEAD_S = 10.0
HEAD_BYTES = 32 * 1024
# Lines of a head and its trailers. Each costs a call of the parser.
HEADER_LINES = 256
# Bytes of a read that can consist of tiny parts, for which a thread of the gateway takes 2 ms. With
# 256 KiB, another client's first byte waited 20 ms.
READ_BYTES = HEAD_BYTES
BODY_S = 30.0
MIN_BYTES_S = 4096
STALL_S = 120.0
LINGER_S = 5.0
# Bytes of a refused request that are discarded beyond the length that it announced.
DISCARDED_BYTES = 256 * 1024
SWEEP_S = 0.5
# Seconds that a replaced gateway keeps a connection without a request. Clients close theirs after 5
# s (httpx) or more.
DRAIN_TIMEOUT_S = 15.0
# Bytes that may wait in the kernel for a slow client, in addition to the bytes on their way.
UNSENT_BYTES = 128 * 1024
# Requests that may wait after the request that is being answered on the same connection. All came
# in one read; the connection is not read further.
MAX_PIPELINED_REQUESTS = 16
# Connections beyond the limit that receive a refusal, each for LINGER_S. Further connections are
# closed immediately.
MAX_REFUSED_CONNECTIONS = 64

_HOST = re.compile(rb"(?:[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
# The headers that the gateway reads. Headers in _SINGLE_HEADERS decide about access or framing, so
# a second header of the same name is refused.
_SINGLE_HEADERS = frozenset(
    {
        b"host",
        b"authorization",
        b"origin",
        b"x-api-key",
        b"content-type",
        b"content-length",
        b"expect",
        priority.HEADER,
    }
)
_READ = _SINGLE_HEADERS | {
    b"accept",
    b"traceparent",
    b"tracestate",
    b"x-request-id",
    b"transfer-encoding",
    b"via",
}
_RESET_LINGER = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that are settings."""

    body_bytes: int = 32 * 1024 * 1024
    file_bytes: int = 512 * 1024 * 1024
    connections: int = 2048
    connections_per_address: int = 1536
    keep_alive_s: float = 75.0
    engine_idle_connections: int = 256
    engine_silence_s: float = 3600.0
    queue_timeout_s: float = 120.0
    waiting_comment_s: float = 10.0
    origins: tuple[str, ...] = ()
    media_hosts: tuple[str, ...] = ("public",)
    proxy_networks: tuple[str, ...] = ()
    client_header: str = ""
    end_revoked: bool = False
    """Whether running requests end with their key."""


def read_head(
    target: bytes, headers: list[tuple[bytes, bytes]], version: str, received_bytes: int
) -> dict[bytes, bytes]:
    """The headers that the gateway uses, by lower-case name. Raises BadRequest, HeadTooLarge.

    `received_bytes`: bytes of the reads that contain the head; they may contain more.
    """
    # The parser accepts a request line without a version, for HTTP/0.9.
    if version not in ("1.0", "1.1"):
        raise BadRequest(
            "The request is not HTTP/1.1.", hint="Send HTTP/1.1 at the end of the request line."
        )
    values: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _READ:
            if name in values:
                if name in _SINGLE_HEADERS:
                    raise BadRequest(
                        f"The request has two {name.decode()} headers.", hint="Send only one."
                    )
                values[name] += b", " + value
            else:
                values[name] = value
        elif b"_" in name:
            raise BadRequest("A header name contains an underscore.", hint="Use a dash instead.")
    if (
        received_bytes > HEAD_BYTES
        and len(target) + sum(len(name) + len(value) + 4 for name, value in headers) > HEAD_BYTES
    ):
        raise head_too_large_error()
    if version == "1.0":
        values.pop(b"expect", None)  # RFC 9110, 10.1.1: HTTP/1.0 has no interim answers.
    host = values.get(b"host")
    if host is None:
        # HTTP/1.0 has no Host header, and health checks of old load balancers use HTTP/1.0.
        if version != "1.0":
            raise BadRequest(
                "The request has no Host header.",
                hint="Send the name in the URL of this gateway as Host.",
            )
    elif not _HOST.fullmatch(host):
        raise BadRequest(
            "The Host header is not a host name.",
            hint="Send NAME, ADDRESS or [ADDRESS], and :PORT if it is not 80.",
        )
    return values


def limit_send_buffer(listener: socket.socket) -> None:
    """Limit the bytes that the kernel keeps unsent to UNSENT_BYTES. By default the kernel keeps
    megabytes, which no limit here counts. Connections that `listener` accepts inherit the
    option."""
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def head_too_large_error() -> HeadTooLarge:
    return HeadTooLarge(
        f"The head of the request is over {HEAD_BYTES} bytes.",
        hint="Send fewer or shorter headers.",
    )


def header_lines_error() -> HeadTooLarge:
    return HeadTooLarge(
        f"The head of the request has over {HEADER_LINES} lines.", hint="Send fewer headers."
    )


def max_wire_bytes(size: int) -> int:
    """The bytes that a body of `size` bytes may take with its framing: one chunk head for each
    byte, and short trailers."""
    return HEAD_BYTES + 8 * size


def framing_too_large_error() -> BadRequest:
    return BadRequest(
        "The framing of the body is far larger than the body.",
        hint="Send larger chunks and no trailers.",
    )


def _socket(transport: asyncio.BaseTransport) -> socket.socket | None:
    """None after the connection is lost. A TLS transport learns of the loss after its socket is
    gone."""
    connection: socket.socket | None = transport.get_extra_info("socket")
    return connection


def has_peer_closed(transport: asyncio.BaseTransport) -> bool:
    """Whether the peer has closed a connection that is not being read. Only the kernel knows. The
    connection of a twin is a pair of sockets, which has no state of TCP."""
    connection = _socket(transport)
    if connection is None:
        return False
    poller = select.poll()
    poller.register(connection.fileno(), select.POLLRDHUP)
    return bool(poller.poll(0))


def refusal_capacity(connections: int) -> int:
    """The number of connections beyond `connections` that receive a refusal. Each takes a file
    until its client closes."""
    return min(MAX_REFUSED_CONNECTIONS, 1 + connections // 8)


Admission = Literal["in", "refused", "out", "internal"]
"""The admission of a connection: `in` stays, `refused` receives a refusal, `out` is closed
immediately. `internal` takes no place: the connection of the client has one for both."""


class ClientProgress:
    """Progress of a client that has not received all bytes written to it."""

    def __init__(self, transport: asyncio.Transport, now: float) -> None:
        self._transport = transport
        self._stalled_since = now
        self._unsent = -1

    def is_over(self, time: float) -> bool:
        """Whether the client received no byte for STALL_S. If so, the kernel is asked to drop the
        unsent bytes on close; otherwise it would offer them for minutes."""
        connection = _socket(self._transport)
        if connection is None:
            return False
        queued = struct.unpack(
            "i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
        )[0]
        unsent = queued + self._transport.get_write_buffer_size()
        if unsent != self._unsent:
            self._unsent = unsent
            self._stalled_since = time
        if time - self._stalled_since <= STALL_S:
            return False
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_LINGER)
        return True


class ConnectionLimiter:
    """Counts admitted connections, in all and by client network, and connections that receive a
    refusal. Addresses of one IPv6 /64 network are one client. A trusted proxy is many."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._proxies = TrustedProxies.parse(limits.proxy_networks)
        self._by_network: Counter[str] = Counter()
        self._refused_count = 0
        self.admitted_count = 0

    def admit(self, address: str) -> Admission:
        """The place of one more connection from `address`. Each call needs one call of `release`
        with its result."""
        network = client_network(address)
        if self.admitted_count < self._limits.connections and (
            self._by_network[network] < self._limits.connections_per_address
            or self._proxies.trusts(address)
        ):
            self.admitted_count += 1
            self._by_network[network] += 1
            return "in"
        if self._refused_count < refusal_capacity(self._limits.connections):
            self._refused_count += 1
            return "refused"
        return "out"

    def release(self, address: str, admission: Admission) -> None:
        if admission == "refused":
            self._refused_count -= 1
        elif admission == "in":
            network = client_network(address)
            self.admitted_count -= 1
            self._by_network[network] -= 1
            if not self._by_network[network]:
                del self._by_network[network]
