"""Heads that come again: a client that keeps its connection sends the same head each time, but for
the length of the body.

The last head of a connection is remembered. A new head that differs only in the digits of
`content-length` is not parsed again: the same bytes in the same place mean the same. That holds for
a request that comes in one piece while the connection is idle, and for an answer that comes in one
piece; other heads are parsed in full. The head of a request has a key in it, so it is compared in
constant time, and is kept no longer than its connection. benchmarks/notebook/performance.md has
the saving.
"""

from __future__ import annotations

import hmac
import re
from typing import TYPE_CHECKING

from gateway.proxy.heads import Headers, passed

if TYPE_CHECKING:
    from gateway.proxy.exchange import Exchange

_MOST_BYTES = 4096
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,9})\r\n", re.IGNORECASE).search
# Headers whose value is new in each request, or which announce more than a head and a body.
_CHANGING = frozenset(
    {b"x-request-id", b"traceparent", b"tracestate", b"expect", b"transfer-encoding"}
)

# Where the digits of a content-length begin and end, and where the head does.
Places = tuple[int, int, int]


class KnownRequestHead:
    """The head of a request, and its meaning. `keys`: the keys in force when the head was read;
    with other keys it is to be read anew."""

    __slots__ = ("_head", "_places", "endpoint", "found", "key", "keys", "lines")

    def __init__(self, exchange: Exchange, keys: object, data: bytes, places: Places) -> None:
        self.endpoint = exchange.endpoint
        self.found: dict[bytes, bytes] = {
            name: exchange.found[name]
            for name in (b"content-type", b"origin", b"via")
            if name in exchange.found
        }
        self.key = exchange.key
        self.lines = exchange.lines
        self.keys = keys
        at, after, end = self._places = places
        self._head = data[:at] + data[after:end]

    def body(self, data: bytes) -> bytes | None:
        """The body of a request that is whole and has this head again; None: the request is to be
        parsed."""
        at, after, end = self._places
        same = data[at:after] == b"%d" % (len(data) - end) and hmac.compare_digest(
            data[:at] + data[after:end], self._head
        )
        return data[end:] if same else None


class KnownAnswerHead:
    """The head of an engine's answer. `lines`: the headers that are passed on."""

    __slots__ = ("_after", "_before", "_places", "lines", "status")

    def __init__(self, status: int, lines: bytes, data: bytes, places: Places) -> None:
        self.status = status
        self.lines = lines
        at, after, end = self._places = places
        self._before, self._after = data[:at], data[after:end]

    def body(self, data: bytes) -> bytes | None:
        """The body of an answer that is whole and has this head again; None: the answer is to be
        parsed."""
        at, after, end = self._places
        same = (
            data[at:after] == b"%d" % (len(data) - end)
            and data[after:end] == self._after
            and data.startswith(self._before)
        )
        return data[end:] if same else None


def remember(data: bytes, exchange: Exchange, keys: object) -> KnownRequestHead | None:
    """The head of `exchange`: `data` holds this head and the body, nothing else. None where the
    head cannot come again, or is not as simple."""
    places = _find(data, exchange.found.get(b"content-length"))
    if (
        places is None
        or not exchange.keep
        or not exchange.chunks
        or not _CHANGING.isdisjoint(exchange.found)
    ):
        return None
    return KnownRequestHead(exchange, keys, data, places)


def remember_answer(
    data: bytes, status: int, headers: Headers, length: bytes | None, read: int
) -> KnownAnswerHead | None:
    """As `remember`, for an answer that leaves its connection reusable. `read`: the bytes of the
    body that the parser found in `data`."""
    places = _find(data, length)
    # Some answers have no body, whatever length their head tells (RFC 9112, 6.3). Which, only the
    # parser decides: a head is known once the parser has found a body behind it, of just that
    # length.
    if places is None or not read or read != len(data) - places[2]:
        return None
    lines, events = passed(headers)
    # An event stream is framed anew, whatever its length.
    return KnownAnswerHead(status, lines, data, places) if not events else None


def _find(data: bytes, length: bytes | None) -> Places | None:
    end = data.find(b"\r\n\r\n") + 4
    match = _LENGTH(data, 0, min(end, _MOST_BYTES))
    if match is None or match[1] != length or int(match[1]) != len(data) - end:
        return None
    return *match.span(1), end
