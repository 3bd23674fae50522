"""Memory shared by all workers of a gateway: a worker sees written values when it next reads.

    responses       `SharedTable`: id of a response and digest of its key -> replica that made it
                    (gateway.proxy.routing.responses)
    failed_logins   `SharedTable`: wrong keys by address (gateway.proxy.access.failed_logins)
    accounts        a row for each key with limits (gateway.proxy.workers.shared_limits)

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
# Row of an account: bucket of requests, bucket of tokens, and current requests by worker.
MAX_WORKERS = 64
ROW_BYTES = 32 + 4 * MAX_WORKERS
ROWS = 16 * 1024

_SLOTS_PER_SET = 8
_SLOT = struct.Struct("<16sII")
_SET = struct.Struct("<" + "16sII" * _SLOTS_PER_SET)
# A try takes some microseconds. A process that holds a lock for all tries was stopped while it held
# the lock, so the lock is ignored.
_TRIES = 200


class SharedTable:
    """A hash table of fixed size in shared memory: key -> number and time. A table has `sets` sets
    of eight slots; a new key takes the slot of the oldest key in its set.

        slot    hash of the key (16 bytes), number, time (0: empty)

    After `sets` new keys, one in 100,000 of them has lost its slot to a newer key; after twice as
    many, one in 1,000. There are no locks: a reader of a half-written slot finds no match, or the
    earlier number.
    """

    def __init__(self, sets: int, memory: memoryview | None = None) -> None:
        self._sets = sets
        self._slots = memory if memory is not None else memoryview(mmap.mmap(-1, sets * _SET.size))

    def get(self, key: bytes) -> tuple[int, int]:
        """Number and time of a key; 0, 0 for an unknown key."""
        tag, offset = self._tag_and_offset(key)
        slots = _SET.unpack_from(self._slots, offset)
        for slot in range(0, len(slots), 3):
            if slots[slot] == tag:
                return slots[slot + 1], slots[slot + 2]
        return 0, 0

    def store(self, key: bytes, number: int, time: int) -> None:
        """Write the slot of the key. A new key takes the oldest slot of its set."""
        tag, offset = self._tag_and_offset(key)
        slots = _SET.unpack_from(self._slots, offset)
        tags = slots[::3]
        times = slots[2::3]
        slot = tags.index(tag) if tag in tags else times.index(min(times))
        _SLOT.pack_into(self._slots, offset + slot * _SLOT.size, tag, number, time)

    def _tag_and_offset(self, key: bytes) -> tuple[bytes, int]:
        digest = hashlib.blake2b(key, digest_size=20).digest()
        return digest[:16], int.from_bytes(digest[16:]) % self._sets * _SET.size


class Lock:
    """A kernel lock on one byte of a file, which ends with its process."""

    def __init__(self, descriptor: int, position: int, tries: int = _TRIES) -> None:
        self._descriptor = descriptor
        self._position = position
        self._tries = tries

    def __enter__(self) -> None:
        for _ in range(self._tries):
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._position)
            except OSError:
                os.sched_yield()  # a busy machine may have taken the processor from the holder
                continue
            return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, self._position)


class SharedMemory:
    """All tables of a gateway in one memory file. `descriptor`: a file that another process
    created; None: a new file."""

    def __init__(self, descriptor: int | None = None) -> None:
        ends = [RESPONSES * _SET.size, FAILED_LOGINS * _SET.size, ROWS * ROW_BYTES]
        if descriptor is None:
            descriptor = os.memfd_create("fitserve")
            os.truncate(descriptor, sum(ends))
        self.descriptor = descriptor
        memory = memoryview(mmap.mmap(descriptor, sum(ends)))
        self.responses = SharedTable(RESPONSES, memory[: ends[0]])
        self.failed_logins = SharedTable(FAILED_LOGINS, memory[ends[0] : ends[0] + ends[1]])
        self.accounts = memory[ends[0] + ends[1] :]

    def lock(self, number: int) -> Lock:
        """The lock with this number. Numbers below `ROWS` belong to accounts."""
        return Lock(self.descriptor, number)
