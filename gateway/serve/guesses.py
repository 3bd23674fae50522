"""Wrong keys, counted per address: whoever guesses is told to come back later, and those with a good key are not.

Up to MOST wrong keys in a minute are answered with 401, more with 429. That alone would not stop a guess from being right, so a key
that could be guessed (one that a person made up) counts from such an address only where it was right before.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable

from gateway.errors import RateLimited

MOST = 10
WINDOW_S = 60.0
# The oldest ones are forgotten.
_ADDRESSES = 10_000


class Guesses:
    """Only the event loop that serves requests touches it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wrong: OrderedDict[str, tuple[float, int]] = OrderedDict()  # when the minute began, and how many since
        self._right: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def wrong(self, address: str) -> None:
        """Raises RateLimited when that was one too many."""
        now, where = self._clock(), _network(address)
        since, count = self._wrong.get(where, (now, 0))
        if now - since >= WINDOW_S:
            since, count = now, 0
        self._wrong[where] = (since, count + 1)
        _forget(self._wrong)
        if count >= MOST:
            raise _too_many(since + WINDOW_S - now)

    def right(self, address: str, digest: bytes) -> None:
        """A key that could be guessed was right. Raises RateLimited where that may be because it was."""
        known = (address, digest) in self._right
        if not known and self._wrong:
            now = self._clock()
            since, count = self._wrong.get(_network(address), (now, 0))
            if count > MOST and now - since < WINDOW_S:
                raise _too_many(since + WINDOW_S - now)
        if not known:
            self._right[address, digest] = None
            _forget(self._right)


def _too_many(wait_s: float) -> RateLimited:
    return RateLimited(
        "Too many wrong keys came from this address.",
        hint="Correct the key and try again later.",
        retry_after_s=math.ceil(wait_s),
    )


def _network(address: str) -> str:
    """Of IPv6, the /64 that one customer has."""
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    return str(found.ipv4_mapped or ipaddress.IPv6Address(int(found) >> 64 << 64))


def _forget(table: OrderedDict[str, tuple[float, int]] | OrderedDict[tuple[str, bytes], None]) -> None:
    if len(table) > _ADDRESSES:
        table.popitem(last=False)
