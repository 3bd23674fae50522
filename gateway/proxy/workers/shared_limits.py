"""Limits of keys where several workers serve: requests are counted in shared memory, so a key has
the same limits as with one process.

row of a key    used of its minute's requests, and when that was so; the same of tokens; requests under way at each worker

The control process gives the rows to keys. A key for which none is left (there are
`shared_memory.ROWS`) has its limits at each worker.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Mapping

from gateway.proxy.access.auth import Key, KeyLimits
from gateway.proxy.access.rate_limits import MINUTE_S, Account, Bucket, RateLimiter
from gateway.proxy.api.endpoints import Shape
from gateway.proxy.shared_memory import MOST_WORKERS, ROW_BYTES, ROWS, SharedMemory

_BUCKET = struct.Struct("<dd")
_COUNT = struct.Struct("<I")
_COUNTS = struct.Struct(f"<{MOST_WORKERS}I")
_COUNTS_AT = 2 * _BUCKET.size


class LimitRows:
    """For the control process: which key has which row."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._of: dict[bytes, int] = {}
        # A row that was given back is the last to be given again: by then the requests of its
        # former key have ended.
        self._free = deque(range(ROWS))

    def of(self, keys: Iterable[Key]) -> dict[bytes, int]:
        """By digest, from now on."""
        limited = dict.fromkeys(key.digest for key in keys if key.limit is not None)
        for digest in [digest for digest in self._of if digest not in limited]:
            self._free.append(self._of.pop(digest))
        for digest in limited:
            if digest not in self._of and self._free:
                row = self._of[digest] = self._free.popleft()
                _row(self._memory, row)[:] = bytes(ROW_BYTES)
        return dict(self._of)

    def forget(self, worker: int) -> None:
        """The worker is dead, and its requests under way have ended."""
        for row in self._of.values():
            _COUNT.pack_into(_row(self._memory, row), _COUNTS_AT + worker * _COUNT.size, 0)


class SharedRateLimiter(RateLimiter):
    """The limiter of a worker. `rows`: by digest of the key, given by the control process."""

    def __init__(self, memory: SharedMemory, worker: int) -> None:
        super().__init__()
        self.rows: Mapping[bytes, int] = {}
        self._memory = memory
        self._worker = worker

    def _open(self, digest: bytes, limit: KeyLimits, now: float) -> Account:
        row = self.rows.get(digest)
        return (
            Account(limit, now) if row is None else _Account(limit, self._memory, row, self._worker)
        )


class _Bucket(Bucket):
    """The shared memory holds the used part, so that zeros are a full bucket."""

    __slots__ = ("_memory",)

    def __init__(self, size: int, memory: memoryview) -> None:
        self.size = size
        self._memory = memory

    def _used(self) -> tuple[float, float]:
        used, at = _BUCKET.unpack(self._memory)
        return used, at

    def level(self, now: float) -> float:
        used, at = self._used()
        # The clocks of two processes are one, but not looked at in the same moment.
        return min(self.size, self.size - used + max(0.0, now - at) * self.size / MINUTE_S)

    def take(self, count: int, now: float) -> None:
        _BUCKET.pack_into(
            self._memory, 0, self.size - self.level(now) + count, max(now, self._used()[1])
        )


class _Account(Account):
    def __init__(self, limit: KeyLimits, memory: SharedMemory, row: int, worker: int) -> None:
        super().__init__(limit, 0.0)
        found = _row(memory, row)
        self._lock = memory.lock(row)
        self._counts = found[_COUNTS_AT:]
        self._at = worker * _COUNT.size
        self.requests = (
            _Bucket(self.requests.size, found[: _BUCKET.size])
            if self.requests is not None
            else None
        )
        self.tokens = (
            _Bucket(self.tokens.size, found[_BUCKET.size : _COUNTS_AT])
            if self.tokens is not None
            else None
        )

    def under_way(self) -> int:
        return sum(_COUNTS.unpack(self._counts))

    def count(self, change: int) -> None:
        """Each worker writes its own."""
        own: int = _COUNT.unpack_from(self._counts, self._at)[0]
        _COUNT.pack_into(self._counts, self._at, max(0, own + change))

    def admit(self, shape: Shape, now: float) -> None:
        with self._lock:
            super().admit(shape, now)

    def end(self, tokens: int, now: float) -> None:
        with self._lock:
            super().end(tokens, now)


def _row(memory: SharedMemory, row: int) -> memoryview:
    return memory.accounts[row * ROW_BYTES : (row + 1) * ROW_BYTES]
