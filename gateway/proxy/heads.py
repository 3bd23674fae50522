"""The heads that the data plane writes: of the request to an engine, and of the answer to a client.

Both are rewritten. Only the values named here pass to the other side, and only plain values. No
framing, hop-by-hop header, cookie or key passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway.proxy.api.endpoints import Endpoint

if TYPE_CHECKING:
    from gateway.proxy.access.auth import Key

Headers = tuple[tuple[bytes, bytes], ...]

VALUE_BYTES = 512  # of a header that is passed on
PLAIN_VALUE = re.compile(rb"[\x20-\x7e]{0,%d}" % VALUE_BYTES).fullmatch
_LENGTH = re.compile(rb"[0-9]{1,18}").fullmatch
# A request that has passed this many fitserve gateways is refused, because they may be endpoints of
# each other.
MAX_HOPS = 4
# Entry of a fitserve gateway in `Via` (RFC 9110, section 7.6.3), added once to a request for a
# remote engine.
_PSEUDONYM = b"1.1 fitserve"
_EVENT_STREAM = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
_FORWARDED_HEADERS = (b"accept", b"traceparent", b"tracestate")


class RequestHead:
    """The meaning of a client's head, which may serve several requests.

    headers: those that the gateway uses.
    forwarded_headers: the lines that go to the engine.
    key: the caller's.
    priority: the priority of the key, or a lower one that the head asks for.
    address: the client's.
    """

    __slots__ = ("address", "endpoint", "forwarded_headers", "headers", "key", "priority")

    def __init__(
        self,
        endpoint: Endpoint,
        headers: dict[bytes, bytes],
        key: Key,
        forwarded_headers: bytes,
        priority: int = 0,
        address: str = "",
    ) -> None:
        self.address = address
        self.priority = priority
        self.endpoint = endpoint
        self.headers = headers
        self.key = key
        self.forwarded_headers = forwarded_headers


def request_head(
    endpoint: Endpoint,
    prefix: bytes,
    host: bytes,
    id_: bytes,
    body: bytes,
    forwarded_headers: bytes,
) -> bytes:
    """Head of a request to an engine. `body`: the header lines that describe the body;
    `forwarded_headers`: the client's lines, from `request_lines`."""
    return (
        b"%b %b%b HTTP/1.1\r\nhost: %b\r\naccept-encoding: identity\r\n"
        b"x-request-id: %b\r\n%b%b\r\n"
    ) % (
        endpoint.method_bytes, prefix, endpoint.target, host, id_, body, forwarded_headers,
    )  # fmt: skip


def request_lines(headers: dict[bytes, bytes]) -> bytes:
    """The header lines of the client that go to the engine."""
    return b"".join(
        [
            b"%b: %b\r\n" % (name, headers[name])
            for name in _FORWARDED_HEADERS
            if name in headers and PLAIN_VALUE(headers[name])
        ]
    )


def gateway_hops(headers: dict[bytes, bytes]) -> int:
    """The number of fitserve gateways that a request has passed."""
    return headers.get(b"via", b"").count(_PSEUDONYM)


def via_line(passed_by: int) -> bytes:
    """The `Via` line with this gateway added; other entries of the client's header are dropped."""
    return b"via: %b\r\n" % b", ".join([_PSEUDONYM] * (passed_by + 1))


FIRST_VIA_LINE = via_line(0)


def find_upgrade(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The other protocol that a request asks for."""
    values = dict(headers)
    tokens = [token.strip() for token in values.get(b"connection", b"").lower().split(b",")]
    return values.get(b"upgrade", b"").lower() or None if b"upgrade" in tokens else None


def head_without_upgrade(
    method: bytes, target: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]
) -> bytes:
    """Head of a request without the wish for another protocol."""
    lines = [b"%b %b HTTP/%b\r\n" % (method, target, version.encode())]
    for name, value in headers:
        if name == b"connection":
            lines.append(b"connection: close\r\n" if b"close" in value.lower() else b"")
        elif name != b"upgrade":
            lines.append(b"%b: %b\r\n" % (name, value))
    return b"".join((*lines, b"\r\n"))


@dataclass(slots=True)
class AnswerHead:
    """Head of an answer in `data`.

    has_events: an event stream follows.
    is_framed: the body is sent in chunks.
    keep_alive: the connection stays open.
    """

    data: bytes
    has_events: bool
    is_framed: bool
    keep_alive: bool


@lru_cache(maxsize=64)
def client_lines(headers: Headers) -> tuple[bytes, bool]:
    """The header lines for the client, and whether an event stream follows. Cached, because engines
    send the same few sets."""
    plain_headers = [(name, value) for name, value in headers if PLAIN_VALUE(value)]
    events = any(
        name == b"content-type" and value[:17].lower() == b"text/event-stream"
        for name, value in plain_headers
    )
    return b"".join(b"%b: %b\r\n" % pair for pair in plain_headers), events


def answer_head(
    status: int,
    headers: Headers,
    length: bytes | None,
    server_lines: bytes,
    id_: bytes,
    *,
    accepts_chunked: bool,
    keep_alive: bool,
) -> AnswerHead:
    """Head of an answer for the client.

    headers: the engine's, limited to those passed on.
    length: its content-length.
    server_lines: the server's.
    accepts_chunked: the client understands chunks.
    """
    forwarded_headers, events = client_lines(headers)
    framing = b""
    framed = False
    if status == 204:
        events = False  # no body, even if the engine announces one
    elif length is not None and _LENGTH(length) and not events:
        framing = b"content-length: %b\r\n" % length
    else:
        # An event stream may end with an additional error event, so its length is open.
        framed = accepts_chunked
        keep_alive = keep_alive and accepts_chunked
        framing = b"transfer-encoding: chunked\r\n" if accepts_chunked else b""
    closes = b"" if keep_alive else b"connection: close\r\n"
    data = b"%b%b%b%bx-request-id: %b\r\nx-gateway-source: engine\r\n%b\r\n" % (
        STATUS_LINE[status], server_lines, forwarded_headers, framing, id_, closes,
    )  # fmt: skip
    return AnswerHead(data, events, framed, keep_alive)


def waiting_head(
    server_lines: bytes, id_: bytes, *, accepts_chunked: bool, keep_alive: bool
) -> AnswerHead:
    """Head of an event stream that begins while its request waits."""
    keep_alive = keep_alive and accepts_chunked
    framing = b"transfer-encoding: chunked\r\n" if accepts_chunked else b""
    closes = b"" if keep_alive else b"connection: close\r\n"
    data = b"%b%b%b%bx-request-id: %b\r\nx-gateway-source: gateway\r\n%b\r\n" % (
        STATUS_LINE[200], server_lines, _EVENT_STREAM, framing, id_, closes,
    )  # fmt: skip
    return AnswerHead(data, has_events=True, is_framed=accepts_chunked, keep_alive=keep_alive)


def whole_answer(
    status: int, forwarded_headers: bytes, server_lines: bytes, id_: bytes, body: bytes
) -> bytes:
    """Head and body of an engine's answer on a connection that stays open. `forwarded_headers`:
    lines from `passed`."""
    return b"%b%b%bcontent-length: %d\r\nx-request-id: %b\r\nx-gateway-source: engine\r\n\r\n%b" % (
        STATUS_LINE[status], server_lines, forwarded_headers, len(body), id_, body,
    )  # fmt: skip
