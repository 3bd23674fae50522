"""Rate limits over several workers: counted in shared memory, so a key keeps its limits.

row of a key    used requests of the minute and their time; the same of tokens; current requests at
                each worker

The control process assigns rows to keys. Beyond `shared_memory.ROWS` keys, a key has its limits at
each worker separately.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Mapping

from gateway.proxy.access.auth import Key, KeyLimits
from gateway.proxy.access.budgets import BudgetAdmission
from gateway.proxy.access.rate_limits import MINUTE_S, Bucket, KeyUsage, RateLimiter
from gateway.proxy.api.endpoints import Shape
from gateway.proxy.shared_memory import MAX_WORKERS, ROW_BYTES, ROWS, SharedMemory

_BUCKET = struct.Struct("<dd")
_COUNT = struct.Struct("<I")
_COUNTS = struct.Struct(f"<{MAX_WORKERS}I")
_COUNTS_AT = 2 * _BUCKET.size


class LimitRows:
    """Assignment of rows to keys, in the control process."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._rows: dict[bytes, int] = {}
        # A freed row is reused last: by then the requests of its former key have ended.
        self._free_rows = deque(range(ROWS))

    def assign(self, keys: Iterable[Key]) -> dict[bytes, int]:
        """The rows of keys with limits, by digest. New keys get rows; rows of other keys are
        freed."""
        limited = dict.fromkeys(key.account for key in keys if key.limit is not None)
        for digest in [digest for digest in self._rows if digest not in limited]:
            self._free_rows.append(self._rows.pop(digest))
        for digest in limited:
            if digest not in self._rows and self._free_rows:
                row = self._rows[digest] = self._free_rows.popleft()
                _memory_row(self._memory, row)[:] = bytes(ROW_BYTES)
        return dict(self._rows)

    def forget(self, worker: int) -> None:
        """Clear the requests of a worker that died."""
        for row in self._rows.values():
            _COUNT.pack_into(_memory_row(self._memory, row), _COUNTS_AT + worker * _COUNT.size, 0)


class SharedRateLimiter(RateLimiter):
    """The limiter of a worker. `rows`: by digest of the key, assigned by the control process."""

    def __init__(
        self, memory: SharedMemory, worker: int, budget_admission: BudgetAdmission | None = None
    ) -> None:
        super().__init__(budget_admission)
        self.rows: Mapping[bytes, int] = {}
        self._memory = memory
        self._worker = worker

    def _open_account(self, digest: bytes, limit: KeyLimits, now: float) -> KeyUsage:
        row = self.rows.get(digest)
        return (
            KeyUsage(limit, now)
            if row is None
            else _Account(limit, self._memory, row, self._worker)
        )


class _Bucket(Bucket):
    """The shared memory holds the used part, so zeros are a full bucket."""

    __slots__ = ("_memory",)

    def __init__(self, size: int, memory: memoryview) -> None:
        self.size = size
        self._memory = memory

    def _usage(self) -> tuple[float, float]:
        used_tokens, used_at = _BUCKET.unpack(self._memory)
        return used_tokens, used_at

    def level(self, now: float) -> float:
        used_tokens, used_at = self._usage()
        # Processes share a clock, but read it at different moments.
        return min(
            self.size, self.size - used_tokens + max(0.0, now - used_at) * self.size / MINUTE_S
        )

    def draw(self, count: int, now: float) -> None:
        _BUCKET.pack_into(
            self._memory, 0, self.size - self.level(now) + count, max(now, self._usage()[1])
        )


class _Account(KeyUsage):
    def __init__(self, limit: KeyLimits, memory: SharedMemory, row: int, worker: int) -> None:
        super().__init__(limit, 0.0)
        shared_row = _memory_row(memory, row)
        self._lock = memory.lock(row)
        self._counts = shared_row[_COUNTS_AT:]
        self._offset = worker * _COUNT.size
        self.requests = (
            _Bucket(self.requests.size, shared_row[: _BUCKET.size])
            if self.requests is not None
            else None
        )
        self.tokens = (
            _Bucket(self.tokens.size, shared_row[_BUCKET.size : _COUNTS_AT])
            if self.tokens is not None
            else None
        )

    def active_requests(self) -> int:
        return sum(_COUNTS.unpack(self._counts))

    def count(self, change: int) -> None:
        """Adds to the current requests of this worker."""
        count: int = _COUNT.unpack_from(self._counts, self._offset)[0]
        _COUNT.pack_into(self._counts, self._offset, max(0, count + change))

    def admit(self, shape: Shape, now: float) -> None:
        with self._lock:
            super().admit(shape, now)

    def finish(self, tokens: int, now: float) -> None:
        with self._lock:
            super().finish(tokens, now)


def _memory_row(memory: SharedMemory, row: int) -> memoryview:
    return memory.accounts[row * ROW_BYTES : (row + 1) * ROW_BYTES]
