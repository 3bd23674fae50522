"""Wrong keys, counted per address: whoever guesses is told to come back later, and those with a good key are not.

Up to MOST wrong keys in a minute are answered with 401, more with 429. That alone would not stop a guess from being right, so a key
that could be guessed (one that a person made up) counts from such an address only where it was right before.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import time
from collections.abc import Callable

from gateway.errors import RateLimited
from gateway.shared_memory import GUESSES, ROWS, Memory, Table

MOST = 10
WINDOW_S = 60.0
# The number of the lock.
_LOCK = ROWS


class Guesses:
    """`memory`: that of several processes, which count as one; None: of this one alone. The oldest addresses are forgotten."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, memory: Memory | None = None) -> None:
        self._clock = clock
        # By address, when the minute began, and how many since; and which keys were right from where.
        self._table = memory.guesses if memory is not None else Table(GUESSES)
        self._lock = memory.lock(_LOCK) if memory is not None else contextlib.nullcontext()

    def wrong(self, address: str) -> None:
        """Raises RateLimited when that was one too many."""
        now, where = self._clock(), _network(address)
        with self._lock:
            count, since = self._table.get(where)
            if not count or now - since >= WINDOW_S:
                since, count = int(now), 0
            self._table.put(where, count + 1, since)
        if count >= MOST:
            raise _too_many(since + WINDOW_S - now)

    def right(self, address: str, digest: bytes) -> None:
        """A key that could be guessed was right. Raises RateLimited where that may be because it was."""
        now, here = self._clock(), address.encode() + digest
        if self._table.get(here)[0]:
            return
        count, since = self._table.get(_network(address))
        if count > MOST and now - since < WINDOW_S:
            raise _too_many(since + WINDOW_S - now)
        self._table.put(here, 1, int(now))


def _too_many(wait_s: float) -> RateLimited:
    return RateLimited(
        "Too many wrong keys came from this address.",
        hint="Correct the key and try again later.",
        retry_after_s=math.ceil(wait_s),
    )


def _network(address: str) -> bytes:
    """Of IPv6, the /64 that one customer has."""
    if ":" not in address:
        return address.encode()
    try:
        found = ipaddress.IPv6Address(address)
    except ValueError:
        return address.encode()
    return str(found.ipv4_mapped or ipaddress.IPv6Address(int(found) >> 64 << 64)).encode()
