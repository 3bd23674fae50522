"""What a client may do to the server around its requests: how many connections, how slowly, how
large a head.

    while                                          at most             then
    a new connection has sent nothing              FIRST_BYTE_S        closed
    the head of a request comes in                 HEAD_S              408, closed
    the head grows                                 HEAD_BYTES          431, closed
    a body comes in                                BODY_S, and 1 s for 408, closed
                                                   LEAST_BYTES_S each
    a body comes in, wrapped in far more bytes     most_on_the_wire    400, closed
    the client takes no byte of its answer         STALL_S             closed
    the connection is kept, without a request      Limits.keep_alive_s closed
    the rest of a refused body is thrown away      LINGER_S in all     closed
    connections are refused, beside those kept     most_refused        closed without a word
    a TLS handshake goes on                        tls.HANDSHAKE_S     closed

While a body waits for memory, others have less time (`body_budget.py`). Nobody has a time while the
gateway does not read.

`DataPlane` looks at all connections twice a second: one timer for all costs less than a timer for
each connection.
"""

from __future__ import annotations

import fcntl
import re
import socket
import struct
import termios
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gateway.errors import BadRequest, HeadTooLarge
from gateway.proxy.access.client_network import client_network

if TYPE_CHECKING:
    import asyncio

FIRST_BYTE_S = 10.0
HEAD_S = 10.0
HEAD_BYTES = 32 * 1024
BODY_S = 30.0
LEAST_BYTES_S = 4096
STALL_S = 120.0
LINGER_S = 5.0
# What is thrown away of a refused request beyond the length that it announced.
DISCARDED_BYTES = 256 * 1024
SWEEP_S = 0.5
# Of a gateway that another one replaces: so long a connection without a request is kept; clients
# forget theirs after 5 s (httpx) and more.
LEAVING_S = 15.0
# Bytes that may wait in the kernel for a client that reads slowly, beside the bytes that are on
# their way.
UNSENT_BYTES = 128 * 1024
# Requests that may wait behind one that is being answered on the same connection: of those that
# came with one read, nothing more is read.
PIPELINED = 16
# Connections beyond the limit that hear why they are refused, each for LINGER_S; the others are
# closed at once.
REFUSED = 64

_HOST = re.compile(rb"(?:[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
# The headers that are read here. The first group decides about access or framing, so a second
# header of the same name is refused.
_ONCE = frozenset(
    {
        b"host",
        b"authorization",
        b"origin",
        b"x-api-key",
        b"content-type",
        b"content-length",
        b"expect",
    }
)
_READ = _ONCE | {
    b"accept",
    b"traceparent",
    b"tracestate",
    b"x-request-id",
    b"transfer-encoding",
    b"via",
}
_ESTABLISHED = 1
_AT_ONCE = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that are settings."""

    body_bytes: int = 32 * 1024 * 1024
    connections: int = 2048
    connections_per_address: int = 1536
    keep_alive_s: float = 75.0
    engine_silence_s: float = 3600.0
    queue_timeout_s: float = 120.0
    waiting_comment_s: float = 10.0
    origins: tuple[str, ...] = ()


def read_head(
    target: bytes, headers: list[tuple[bytes, bytes]], version: str, received: int
) -> dict[bytes, bytes]:
    """The headers that count, by lower-case name. Raises BadRequest, HeadTooLarge.

    received: bytes of the reads that the head came in, of which it may be a part only.
    """
    if version not in (
        "1.0",
        "1.1",
    ):  # the parser also takes a request line without a version, for HTTP/0.9
        raise BadRequest(
            "The request is not HTTP/1.1.", hint="Send HTTP/1.1 at the end of the request line."
        )
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _READ:
            if name in found:
                if name in _ONCE:
                    raise BadRequest(
                        f"The request has two {name.decode()} headers.", hint="Send one."
                    )
                found[name] += b", " + value
            else:
                found[name] = value
        elif b"_" in name:
            raise BadRequest("A header name has an underscore in it.", hint="Write it with a dash.")
    if (
        received > HEAD_BYTES
        and len(target) + sum(len(name) + len(value) + 4 for name, value in headers) > HEAD_BYTES
    ):
        raise head_too_large()
    host = found.get(b"host")
    if host is None:
        # HTTP/1.0 has no Host, and the health checks of old load balancers speak it.
        if version != "1.0":
            raise BadRequest(
                "The request has no Host header.",
                hint="Send one, with the name that this gateway was asked for.",
            )
    elif not _HOST.fullmatch(host):
        raise BadRequest(
            "The Host header is not a host name.",
            hint="Send NAME, ADDRESS or [ADDRESS], and :PORT if it is not 80.",
        )
    return found


def hold_little(listener: socket.socket) -> None:
    """Lets the kernel keep at most UNSENT_BYTES that the client has not read; by default the kernel
    keeps megabytes, which no limit here counts.
    Every connection that `listener` accepts inherits the option."""
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def head_too_large() -> HeadTooLarge:
    return HeadTooLarge(
        f"The head of the request is over {HEAD_BYTES} bytes.",
        hint="Send fewer or shorter headers.",
    )


def most_on_the_wire(size: int) -> int:
    """How many bytes a body of `size` bytes may come in: the heads of its chunks, if each chunk is
    one byte, and short trailers."""
    return HEAD_BYTES + 8 * size


def framing_too_large() -> BadRequest:
    return BadRequest(
        "The body comes in with far more bytes around it than in it.",
        hint="Send larger chunks and no trailers.",
    )


def _socket(transport: asyncio.BaseTransport) -> socket.socket | None:
    """None: the connection is lost. Through TLS its protocol hears that a moment after the socket
    is gone."""
    found: socket.socket | None = transport.get_extra_info("socket")
    return found


def has_left(transport: asyncio.BaseTransport) -> bool:
    """Whether the peer has closed a connection that is not being read. Only the kernel knows."""
    connection = _socket(transport)
    return (
        connection is not None
        and connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED
    )


def most_refused(connections: int) -> int:
    """How many connections beyond `connections` hear why they are refused: each takes a file until
    its client has left."""
    return min(REFUSED, 1 + connections // 8)


Place = Literal["in", "refused", "out"]
"""Of a connection: it may stay; it hears why not; there is no room for words either, and it is
closed at once."""


class Stall:
    """Watches a client that has not taken all bytes that were written: whether the client takes
    any."""

    def __init__(self, transport: asyncio.Transport, now: float) -> None:
        self._transport = transport
        self._since = now
        self._left = -1

    def over(self, now: float) -> bool:
        """Whether the client took no byte for STALL_S. Then its connection is to be closed, and the
        kernel is told to drop what was written:
        otherwise the kernel would offer these bytes for minutes to a client that never reads."""
        connection = _socket(self._transport)
        if connection is None:
            return False
        queued = struct.unpack(
            "i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
        )[0]
        left = queued + self._transport.get_write_buffer_size()
        if left != self._left:
            self._left, self._since = left, now
        if now - self._since <= STALL_S:
            return False
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        return True


class ConnectionLimiter:
    """Counts the connections: those that were let in, all and by address, and beside them those
    that hear why they are not. The addresses
    of one IPv6 network (/64) are one client's."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._of: Counter[str] = Counter()
        self._refused = 0
        self.admitted = 0

    def come(self, address: str) -> Place:
        """Of one more connection from `address`. The call of `left` that each call needs has the
        answer of this one."""
        network = client_network(address)
        if (
            self.admitted < self._limits.connections
            and self._of[network] < self._limits.connections_per_address
        ):
            self.admitted += 1
            self._of[network] += 1
            return "in"
        if self._refused < most_refused(self._limits.connections):
            self._refused += 1
            return "refused"
        return "out"

    def left(self, address: str, place: Place) -> None:
        if place == "refused":
            self._refused -= 1
        elif place == "in":
            network = client_network(address)
            self.admitted -= 1
            self._of[network] -= 1
            if not self._of[network]:
                del self._of[network]
