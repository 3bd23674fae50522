"""The two heads that the data plane writes: the request's to the engine, the answer's to the
client. Both anew.

Nothing of one side goes to the other but the values named here, and those only when they are plain:
no framing, no hop-by-hop header, no cookie or key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway.proxy.api.endpoints import Endpoint

Headers = tuple[tuple[bytes, bytes], ...]

VALUE_BYTES = 512  # of a header that is passed on
_PLAIN = re.compile(rb"[\x20-\x7e]{0,%d}" % VALUE_BYTES).fullmatch
_LENGTH = re.compile(rb"[0-9]{1,18}").fullmatch
# A request that has passed so many gateways of this kind goes to no further one: they may be
# endpoints of each other.
MOST_HOPS = 4
# What gateways of this kind write into `Via` (RFC 9110, section 7.6.3), each once for a request
# that goes to an engine elsewhere.
_PSEUDONYM = b"1.1 fitserve"
_PASSED = (b"accept", b"traceparent", b"tracestate")


def request_head(
    endpoint: Endpoint, prefix: bytes, host: bytes, id_: bytes, body: bytes, lines: bytes
) -> bytes:
    """`body`: the header lines that describe it; `lines`: the client's, as `request_lines` gives
    them."""
    return b"%b %b%b HTTP/1.1\r\nhost: %b\r\naccept-encoding: identity\r\nx-request-id: %b\r\n%b%b\r\n" % (
        endpoint.method_bytes, prefix, endpoint.target, host, id_, body, lines,
    )  # fmt: skip


def request_lines(found: dict[bytes, bytes]) -> bytes:
    """Of the client's headers those that go to the engine."""
    return b"".join(
        [
            b"%b: %b\r\n" % (name, found[name])
            for name in _PASSED
            if name in found and _PLAIN(found[name])
        ]
    )


def hops(found: dict[bytes, bytes]) -> int:
    """How many gateways of this kind a request has passed."""
    return found.get(b"via", b"").count(_PSEUDONYM)


def via_line(passed_by: int) -> bytes:
    """With this one; nothing else of the client's header goes on."""
    return b"via: %b\r\n" % b", ".join([_PSEUDONYM] * (passed_by + 1))


def upgrade_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The other protocol that a request asks for."""
    found = dict(headers)
    tokens = [token.strip() for token in found.get(b"connection", b"").lower().split(b",")]
    return found.get(b"upgrade", b"").lower() or None if b"upgrade" in tokens else None


def head_without_upgrade(
    method: bytes, target: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]
) -> bytes:
    """A request's head without the wish for another protocol."""
    lines = [b"%b %b HTTP/%b\r\n" % (method, target, version.encode())]
    for name, value in headers:
        if name == b"connection":
            lines.append(b"connection: close\r\n" if b"close" in value.lower() else b"")
        elif name != b"upgrade":
            lines.append(b"%b: %b\r\n" % (name, value))
    return b"".join((*lines, b"\r\n"))


@dataclass(slots=True)
class AnswerHead:
    """`data` to write; whether the body is an event stream, goes out in chunks, and whether the
    connection can be kept after it."""

    data: bytes
    events: bool
    framed: bool
    keep: bool


@lru_cache(maxsize=64)
def passed(headers: Headers) -> tuple[bytes, bool]:
    """The lines for the client, and whether an event stream follows. Engines say the same few over
    and over."""
    plain = [(name, value) for name, value in headers if _PLAIN(value)]
    events = any(
        name == b"content-type" and value[:17].lower() == b"text/event-stream"
        for name, value in plain
    )
    return b"".join(b"%b: %b\r\n" % pair for pair in plain), events


def answer_head(
    status: int,
    headers: Headers,
    length: bytes | None,
    own: bytes,
    id_: bytes,
    *,
    chunks: bool,
    keep: bool,
    source: bytes = b"engine",
) -> AnswerHead:
    """`headers`: the engine's, of those that may be passed on; `length`: its content-length; `own`:
    the server's lines; `chunks`: the
    client understands them."""
    lines, events = passed(headers)
    framing, framed = b"", False
    if status == 204:
        events = False  # it has no body, whatever its engine says
    elif length is not None and _LENGTH(length) and not events:
        framing = b"content-length: %b\r\n" % length
    else:
        # An event stream has no length that could be promised: it may end with an error event.
        framed, keep = chunks, keep and chunks
        framing = b"transfer-encoding: chunked\r\n" if chunks else b""
    closes = b"" if keep else b"connection: close\r\n"
    data = b"%b%b%b%bx-request-id: %b\r\nx-gateway-source: %b\r\n%b\r\n" % (
        STATUS_LINE[status], own, lines, framing, id_, source, closes,
    )  # fmt: skip
    return AnswerHead(data, events, framed, keep)


def whole_answer(status: int, lines: bytes, own: bytes, id_: bytes, body: bytes) -> bytes:
    """Head and body of an engine's answer after which the connection is kept; `lines`: as `passed`
    gives them."""
    return b"%b%b%bcontent-length: %d\r\nx-request-id: %b\r\nx-gateway-source: engine\r\n\r\n%b" % (
        STATUS_LINE[status], own, lines, len(body), id_, body,
    )  # fmt: skip
