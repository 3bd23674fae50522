"""Heads that come again: who keeps a connection says the same head each time, but for the length of the body.

A head that was read and let in is remembered, and one that differs from it in nothing but the digits of `content-length` is not read
again: the same bytes in the same place mean the same, whatever they mean. That holds for a request that comes in one piece to a
connection that waits for one; any other is read in full. Of the head a keyed hash is kept, for there is a key in it.
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
_DIGITS = 9
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,%d})\r\n" % _DIGITS, re.IGNORECASE).search
# What is another one in each request, or says that more than head and body are to come.
_CHANGING = frozenset({b"x-request-id", b"traceparent", b"tracestate", b"expect", b"transfer-encoding"})
# What is looked at after the head was let in.
_KEPT = (b"accept", b"content-type")
_SECRET = secrets.token_bytes(32)


class Repeat:
    """The head of `exchange`, and what was found out about it. `keys`: those in force then; with others it is to be read anew."""

    __slots__ = ("_at", "_digest", "endpoint", "found", "key", "keys")

    def __init__(self, exchange: Exchange, keys: object, at: int, digest: bytes) -> None:
        self.endpoint = exchange.endpoint
        self.found = {name: exchange.found[name] for name in _KEPT if name in exchange.found}
        self.key = exchange.key
        self.keys = keys
        self._at = at
        self._digest = digest

    def body(self, data: bytes) -> bytes | None:
        """Of a request that is whole and has this head again; None: it is to be read."""
        at = self._at
        after = data.find(b"\r\n", at, at + _DIGITS + 2)
        end = data.find(b"\r\n\r\n", after) + 4
        digits = data[at:after]
        if after < 0 or end < 4 or not digits.isdigit() or int(digits) != len(data) - end:
            return None
        return data[end:] if hmac.compare_digest(_digest(data[:at] + data[after:end]), self._digest) else None


def remember(data: bytes, exchange: Exchange, keys: object) -> Repeat | None:
    """The head of `exchange`, which is all that `data` holds beside its body; None where it cannot come again, or is not as simple."""
    end = data.find(b"\r\n\r\n") + 4
    length = exchange.found.get(b"content-length", b"")
    match = _LENGTH(data, 0, end)
    simple = exchange.keep and exchange.chunks and match is not None and match[1] == length and int(length) == len(data) - end
    if not simple or match is None or end > _MOST_BYTES or not _CHANGING.isdisjoint(exchange.found):
        return None
    at, after = match.span(1)
    return Repeat(exchange, keys, at, _digest(data[:at] + data[after:end]))


def _digest(head: bytes) -> bytes:
    return hashlib.blake2b(head, key=_SECRET, digest_size=16).digest()
