"""The two heads that the data plane writes: the request's to the engine, the answer's to the client. Both anew.

Nothing of one side goes to the other but the values named here, and those only when they are plain: no framing, no hop-by-hop
header, no cookie or key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway.serve.surface import Endpoint

Headers = list[tuple[bytes, bytes]]

_PLAIN = re.compile(rb"[\x20-\x7e]{0,512}").fullmatch
_TO_ENGINE = (b"accept", b"traceparent", b"tracestate")


def request_head(endpoint: Endpoint, prefix: bytes, host: bytes, id_: bytes, body: bytes, found: dict[bytes, bytes]) -> bytes:
    """`body`: the header lines that describe it; `found`: the client's headers."""
    head = b"%b %b%b HTTP/1.1\r\nhost: %b\r\naccept-encoding: identity\r\nx-request-id: %b\r\n%b" % (
        endpoint.method_bytes,
        prefix,
        endpoint.target,
        host,
        id_,
        body,
    )
    for name in _TO_ENGINE:
        value = found.get(name)
        if value is not None and _PLAIN(value):
            head += b"%b: %b\r\n" % (name, value)
    return head + b"\r\n"


@dataclass(slots=True)
class AnswerHead:
    """`data` to write; whether the body is an event stream, goes out in chunks, and whether the connection can be kept after it."""

    data: bytes
    events: bool
    framed: bool
    keep: bool


def answer_head(
    status: int, headers: Headers, own: bytes, id_: bytes, *, chunks: bool, keep: bool, source: bytes = b"engine"
) -> AnswerHead:
    """`headers`: the engine's, of those that may be passed on; `own`: the server's lines; `chunks`: the client understands them."""
    length = None
    events = framed = False
    lines = [STATUS_LINE[status], own]
    for name, value in headers:
        if not _PLAIN(value):
            continue
        if name == b"content-length":
            length = value
            continue
        if name == b"content-type":
            events = value[:17].lower() == b"text/event-stream"
        lines.append(b"%b: %b\r\n" % (name, value))
    if length is not None and not events:
        lines.append(b"content-length: %b\r\n" % length)
    elif status != 204:
        # An event stream has no length that could be promised: it may end with an error event.
        framed, keep = chunks, keep and chunks
        lines.append(b"transfer-encoding: chunked\r\n" if chunks else b"")
    closes = b"" if keep else b"connection: close\r\n"
    lines.append(b"x-request-id: %b\r\nx-gateway-source: %b\r\n%b\r\n" % (id_, source, closes))
    return AnswerHead(b"".join(lines), events, framed, keep)
