"""Counts of wrong keys by address: a client that guesses keys is slowed down.

Up to MAX_FAILURES wrong keys in a minute are answered with 401, more with 429; clients with a valid
key are not affected. A guess could still be right. So an address with too many wrong keys may not
use a guessable key (invented by a person), unless it used that key before.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable

from gateway.errors import RateLimited
from gateway.proxy.access.client_network import client_network
from gateway.proxy.shared_memory import FAILED_LOGINS, ROWS, SharedMemory, SharedTable

MAX_FAILURES = 10
WINDOW_S = 60.0
# Index of the lock.
_LOCK = ROWS


class FailedLogins:
    """Counts of wrong keys. `memory`: shared by several processes, None: only of this process. The
    oldest addresses are dropped."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, memory: SharedMemory | None = None
    ) -> None:
        self._clock = clock
        # Address -> count of wrong keys and the start of their minute; address and key -> 1 after
        # the key was right.
        self._table = memory.failed_logins if memory is not None else SharedTable(FAILED_LOGINS)
        self._lock = memory.lock(_LOCK) if memory is not None else contextlib.nullcontext()

    def count_wrong_key(self, address: str) -> None:
        """Count a wrong key. Raises RateLimited after too many."""
        now = self._clock()
        network = client_network(address).encode()
        with self._lock:
            count, start = self._table.get(network)
            if not count or now - start >= WINDOW_S:
                start = int(now)
                count = 0
            self._table.store(network, count + 1, start)
        if count >= MAX_FAILURES:
            raise _rate_error(start + WINDOW_S - now)

    def accept_guessable_key(self, address: str, digest: bytes) -> None:
        """Accept a guessable key. Raises RateLimited if it may have been guessed just now."""
        now = self._clock()
        login = address.encode() + digest
        if self._table.get(login)[0]:
            return
        count, start = self._table.get(client_network(address).encode())
        if count > MAX_FAILURES and now - start < WINDOW_S:
            raise _rate_error(start + WINDOW_S - now)
        self._table.store(login, 1, int(now))


def _rate_error(wait_s: float) -> RateLimited:
    return RateLimited(
        "Too many wrong keys came from this address.",
        hint="Correct the key and try again later.",
        retry_after_s=math.ceil(wait_s),
    )
