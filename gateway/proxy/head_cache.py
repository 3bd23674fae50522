"""Heads that repeat on a connection, apart from the length of the body.

The last head of a connection is remembered. A new head that differs only in the digits of
`content-length` is not parsed again: the same bytes in the same place mean the same. The cache
serves a request in one piece on an idle connection, and an answer in one piece. Other heads are
parsed in full. A request's head contains a key, so the comparison takes constant time, and the head
is kept no longer than its connection. Measured savings: benchmarks/notebook/performance.md.
"""

from __future__ import annotations

import hmac
import re
from typing import TYPE_CHECKING

from gateway.proxy.heads import Headers, RequestHead, client_lines

if TYPE_CHECKING:
    from gateway.proxy.exchange import Exchange

_MAX_BYTES = 4096
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,9})\r\n", re.IGNORECASE).search
# Headers with a new value in each request, or that announce more than a head and a body.
_VARYING_HEADERS = frozenset(
    {b"x-request-id", b"traceparent", b"tracestate", b"expect", b"transfer-encoding"}
)

# Positions: begin and end of the digits of content-length, end of the head.
LengthRange = tuple[int, int, int]


class KnownRequestHead:
    """The bytes of a request's head and their meaning. `keys`: the keys in force when the head was
    read; other keys make it invalid."""

    __slots__ = ("_head", "_length_range", "keys", "meaning")

    def __init__(
        self, head: RequestHead, keys: object, data: bytes, length_range: LengthRange
    ) -> None:
        headers: dict[bytes, bytes] = {
            name: head.headers[name]
            for name in (b"content-type", b"origin", b"via")
            if name in head.headers
        }
        self.meaning = RequestHead(
            head.endpoint,
            headers,
            head.key,
            head.forwarded_headers,
            priority=head.priority,
            address=head.address,
        )
        self.keys = keys
        start, stop, end = self._length_range = length_range
        self._head = data[:start] + data[stop:end]

    def body(self, data: bytes) -> bytes | None:
        """The body of a complete request with this same head; None: the request has to be
        parsed."""
        start, stop, end = self._length_range
        equal = data[start:stop] == b"%d" % (len(data) - end) and hmac.compare_digest(
            data[:start] + data[stop:end], self._head
        )
        return data[end:] if equal else None


class KnownAnswerHead:
    """The head of an engine's answer. `forwarded_headers`: the header lines that are passed on."""

    __slots__ = (
        "_head_after_date",
        "_head_before_date",
        "_length_range",
        "forwarded_headers",
        "status",
    )

    def __init__(
        self, status: int, forwarded_headers: bytes, data: bytes, length_range: LengthRange
    ) -> None:
        self.status = status
        self.forwarded_headers = forwarded_headers
        start, stop, end = self._length_range = length_range
        self._head_before_date = data[:start]
        self._head_after_date = data[stop:end]

    def body(self, data: bytes) -> bytes | None:
        """The body of a complete answer with this same head; None: the answer has to be parsed."""
        start, stop, end = self._length_range
        equal = (
            data[start:stop] == b"%d" % (len(data) - end)
            and data[stop:end] == self._head_after_date
            and data.startswith(self._head_before_date)
        )
        return data[end:] if equal else None


def remember(data: bytes, exchange: Exchange, keys: object) -> KnownRequestHead | None:
    """The head of `exchange`, where `data` is this head and the body. None where the head cannot
    repeat, or is not simple."""
    length_range = _find_length_range(data, exchange.request_head.headers.get(b"content-length"))
    if (
        length_range is None
        or not exchange.keep_alive
        or not exchange.answer.accepts_chunked
        or exchange.key.ends_at is not None
        or not _VARYING_HEADERS.isdisjoint(exchange.request_head.headers)
    ):
        return None
    return KnownRequestHead(exchange.request_head, keys, data, length_range)


def remember_answer(
    data: bytes, status: int, headers: Headers, length: bytes | None, read: int
) -> KnownAnswerHead | None:
    """The head of an answer that leaves its connection reusable, or None. `read`: the bytes of the
    body that the parser found in `data`."""
    length_range = _find_length_range(data, length)
    # Some answers have no body, whatever length their head announces (RFC 9112, 6.3), and only the
    # parser knows them. So the parser must have found a body of exactly that length.
    if length_range is None or not read or read != len(data) - length_range[2]:
        return None
    forwarded_headers, events = client_lines(headers)
    # Event streams are reframed, so their heads are not cached.
    return KnownAnswerHead(status, forwarded_headers, data, length_range) if not events else None


def _find_length_range(data: bytes, length: bytes | None) -> LengthRange | None:
    end = data.find(b"\r\n\r\n") + 4
    match = _LENGTH(data, 0, min(end, _MAX_BYTES))
    if match is None or match[1] != length or int(match[1]) != len(data) - end:
        return None
    return *match.span(1), end
