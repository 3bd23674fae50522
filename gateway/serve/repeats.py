"""Heads that come again: who keeps a connection says the same head each time, but for the length of the body.

A head that was read is remembered, and one that differs from it in nothing but the digits of `content-length` is not read again: the
same bytes in the same place mean the same, whatever they mean. That holds for a request that comes in one piece to a connection that
waits for one, and for an answer that comes in one piece; any other is read in full. Of a request's head a keyed hash is kept, for
there is a key in it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.serve.exchange import Exchange

_MOST_BYTES = 4096
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,9})\r\n", re.IGNORECASE).search
# What is another one in each request, or says that more than head and body are to come.
_CHANGING = frozenset({b"x-request-id", b"traceparent", b"tracestate", b"expect", b"transfer-encoding"})
# What is looked at after the head was let in.
_KEPT = (b"accept", b"content-type")
_SECRET = secrets.token_bytes(32)

# Where the digits of a content-length begin and end, and where the head does.
Places = tuple[int, int, int]


class Repeat:
    """The head of a request, and what was found out about it. `keys`: those in force then; with others it is to be read anew."""

    __slots__ = ("_digest", "_places", "endpoint", "found", "key", "keys")

    def __init__(self, exchange: Exchange, keys: object, data: bytes, places: Places) -> None:
        self.endpoint = exchange.endpoint
        self.found = {name: exchange.found[name] for name in _KEPT if name in exchange.found}
        self.key = exchange.key
        self.keys = keys
        self._places = places
        self._digest = _digest(data, places)

    def body(self, data: bytes) -> bytes | None:
        """Of a request that is whole and has this head again; None: it is to be read."""
        places = at, after, end = self._places
        if data[at:after] != b"%d" % (len(data) - end) or not hmac.compare_digest(_digest(data, places), self._digest):
            return None
        return data[end:]


class Echo:
    """The head of an engine's answer; `status` and `headers` are what was read in it."""

    __slots__ = ("_after", "_before", "_places", "headers", "status")

    def __init__(self, status: int, headers: tuple[tuple[bytes, bytes], ...], data: bytes, places: Places) -> None:
        self.status = status
        self.headers = headers
        at, after, end = self._places = places
        self._before, self._after = data[:at], data[after:end]

    def length(self, data: bytes) -> bytes | None:
        """The content-length of an answer that is whole and has this head again; None: it is to be read."""
        at, after, end = self._places
        digits = data[at:after]
        same = digits == b"%d" % (len(data) - end) and data[after:end] == self._after and data.startswith(self._before)
        return digits if same else None

    def body(self, data: bytes) -> bytes:
        return data[self._places[2] :]


def remember(data: bytes, exchange: Exchange, keys: object) -> Repeat | None:
    """The head of `exchange`, which is all that `data` holds beside its body; None where it cannot come again, or is not as simple."""
    places = _find(data, exchange.found.get(b"content-length"))
    if places is None or not exchange.keep or not exchange.chunks or not _CHANGING.isdisjoint(exchange.found):
        return None
    return Repeat(exchange, keys, data, places)


def remember_answer(data: bytes, status: int, headers: tuple[tuple[bytes, bytes], ...], length: bytes | None) -> Echo | None:
    """As `remember`, of an answer that leaves its connection good for another one."""
    places = _find(data, length)
    return Echo(status, headers, data, places) if places is not None else None


def _find(data: bytes, length: bytes | None) -> Places | None:
    end = data.find(b"\r\n\r\n") + 4
    match = _LENGTH(data, 0, min(end, _MOST_BYTES))
    if match is None or match[1] != length or int(match[1]) != len(data) - end:
        return None
    return *match.span(1), end


def _digest(data: bytes, places: Places) -> bytes:
    """Of the head without those digits."""
    at, after, end = places
    return hashlib.blake2b(data[:at] + data[after:end], key=_SECRET, digest_size=16).digest()
