"""Memory that all workers of a gateway share. A value that one worker writes, the other workers
read at their next look.

    responses        `SharedTable`: id of a response and digest of its key -> the replica that made it     (gateway.proxy.routing.responses)
    failed_logins    `SharedTable`: wrong keys by address                                                  (gateway.proxy.access.failed_logins)
    accounts         a row for each key with limits                                                        (gateway.proxy.workers.shared_limits)

A value that more than one worker changes is changed under a lock. A gateway of one process uses
tables of the same kind in its own memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
from types import TracebackType

RESPONSES = 32 * 1024
FAILED_LOGINS = 2 * 1024
# A key's bucket of requests, that of tokens, and its requests under way by worker.
MOST_WORKERS = 64
ROW_BYTES = 32 + 4 * MOST_WORKERS
ROWS = 16 * 1024

_SLOTS_PER_SET = 8
_SLOT = struct.Struct("<16sII")
_SET = struct.Struct("<" + "16sII" * _SLOTS_PER_SET)
# Each try takes some microseconds. A process that holds a lock longer than all tries was stopped
# while it held the lock; nobody waits for it.
_TRIES = 200


class SharedTable:
    """A hash table of fixed size in shared memory: key -> number and time. It has `sets` sets of
    eight slots; a new key takes the slot of the
    oldest key in its set.

    slot    hash of the key (16 bytes), number, time (0: empty)

    After `sets` new keys, one in 100,000 of them has lost its slot to a newer key; after twice as
    many, one in 1,000.

    Nothing locks: a reader that meets a half-written slot finds no match, or the number from
    before.
    """

    def __init__(self, sets: int, memory: memoryview | None = None) -> None:
        self._sets = sets
        self._slots = memory if memory is not None else memoryview(mmap.mmap(-1, sets * _SET.size))

    def get(self, key: bytes) -> tuple[int, int]:
        """Number and time of a key; 0, 0 for an unknown key."""
        tag, at = self._place(key)
        slots = _SET.unpack_from(self._slots, at)
        for slot in range(0, len(slots), 3):
            if slots[slot] == tag:
                return slots[slot + 1], slots[slot + 2]
        return 0, 0

    def put(self, key: bytes, number: int, time: int) -> None:
        """Writes the slot of the key. A new key takes the oldest slot of its set."""
        tag, at = self._place(key)
        slots = _SET.unpack_from(self._slots, at)
        tags, times = slots[::3], slots[2::3]
        slot = tags.index(tag) if tag in tags else times.index(min(times))
        _SLOT.pack_into(self._slots, at + slot * _SLOT.size, tag, number, time)

    def _place(self, key: bytes) -> tuple[bytes, int]:
        digest = hashlib.blake2b(key, digest_size=20).digest()
        return digest[:16], int.from_bytes(digest[16:]) % self._sets * _SET.size


class Lock:
    """A lock of the kernel on one byte of a file. The lock ends with the process that holds it."""

    def __init__(self, descriptor: int, at: int) -> None:
        self._descriptor = descriptor
        self._at = at

    def __enter__(self) -> None:
        for _ in range(_TRIES):
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._at)
            except OSError:
                continue
            return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, self._at)


class SharedMemory:
    """All tables of a gateway in one memory file. `descriptor`: of a file that another process has
    made; None: a new file."""

    def __init__(self, descriptor: int | None = None) -> None:
        ends = [RESPONSES * _SET.size, FAILED_LOGINS * _SET.size, ROWS * ROW_BYTES]
        if descriptor is None:
            descriptor = os.memfd_create("fitserve")
            os.truncate(descriptor, sum(ends))
        self.descriptor = descriptor
        whole = memoryview(mmap.mmap(descriptor, sum(ends)))
        self.responses = SharedTable(RESPONSES, whole[: ends[0]])
        self.failed_logins = SharedTable(FAILED_LOGINS, whole[ends[0] : ends[0] + ends[1]])
        self.accounts = whole[ends[0] + ends[1] :]

    def lock(self, at: int) -> Lock:
        """The lock with this number. Numbers below `ROWS` belong to accounts."""
        return Lock(self.descriptor, at)
