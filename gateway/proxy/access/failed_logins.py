"""Wrong keys, counted by address: a client that guesses keys is told to come back later; clients
with a good key are not.

Up to MOST wrong keys in a minute are answered with 401, more with 429. A client could still guess
right on the way. So a key that is easy to guess (a person made it up) is not accepted from an
address with too many wrong keys, unless it was used from there before.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable

from gateway.errors import RateLimited
from gateway.proxy.access.client_network import client_network
from gateway.proxy.shared_memory import FAILED_LOGINS, ROWS, SharedMemory, SharedTable

MOST = 10
WINDOW_S = 60.0
# The number of the lock.
_LOCK = ROWS


class FailedLogins:
    """The counts. `memory`: shared by several processes, which count together; None: this process
    counts alone. The oldest addresses are
    forgotten."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, memory: SharedMemory | None = None
    ) -> None:
        self._clock = clock
        # Address -> wrong keys and the begin of their minute; address and key -> 1 where the key
        # was right.
        self._table = memory.failed_logins if memory is not None else SharedTable(FAILED_LOGINS)
        self._lock = memory.lock(_LOCK) if memory is not None else contextlib.nullcontext()

    def wrong(self, address: str) -> None:
        """A wrong key came. Raises RateLimited where too many have come."""
        now, where = self._clock(), client_network(address).encode()
        with self._lock:
            count, since = self._table.get(where)
            if not count or now - since >= WINDOW_S:
                since, count = int(now), 0
            self._table.put(where, count + 1, since)
        if count >= MOST:
            raise _too_many(since + WINDOW_S - now)

    def right(self, address: str, digest: bytes) -> None:
        """A key that is easy to guess was right. Raises RateLimited where somebody may have guessed
        it just now."""
        now, here = self._clock(), address.encode() + digest
        if self._table.get(here)[0]:
            return
        count, since = self._table.get(client_network(address).encode())
        if count > MOST and now - since < WINDOW_S:
            raise _too_many(since + WINDOW_S - now)
        self._table.put(here, 1, int(now))


def _too_many(wait_s: float) -> RateLimited:
    return RateLimited(
        "Too many wrong keys came from this address.",
        hint="Correct the key and try again later.",
        retry_after_s=math.ceil(wait_s),
    )
