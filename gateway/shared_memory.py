"""What all workers of a gateway know at once: memory that they share. What one of them writes, the others read with their next look.

    responses   `Table`: id of a response and digest of its key -> the replica that made it     (gateway.serve.responses)
    guesses     `Table`: wrong keys by address                                                  (gateway.serve.guesses)
    accounts    a row for each key with limits                                                  (gateway.serve.shares)

What more than one of them changes is changed under a lock. One process alone uses tables of its own, of the same kind.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
from types import TracebackType

RESPONSES = 32 * 1024
GUESSES = 2 * 1024
# A key's bucket of requests, that of tokens, and its requests under way by worker.
MOST_WORKERS = 64
ROW_BYTES = 32 + 4 * MOST_WORKERS
ROWS = 16 * 1024

_WAYS = 8
_SLOT = struct.Struct("<16sII")
_SET = struct.Struct("<" + "16sII" * _WAYS)
# Some microseconds each. Who holds a lock longer than all of them was stopped in it, and is not waited for.
_TRIES = 200


class Table:
    """A number for each of many things, and when it was told: `sets` times eight slots, in which new things take the place of old ones.

    slot    hash of the thing (16 bytes), number, time (0: empty)

    Of the last `sets` things that were told one in 100,000 is lost, of twice as many one in 1,000.

    Nothing locks: a slot that is read while it is written is no match, or has the number that was there before.
    """

    def __init__(self, sets: int, memory: memoryview | None = None) -> None:
        self._sets = sets
        self._slots = memory if memory is not None else memoryview(mmap.mmap(-1, sets * _SET.size))

    def get(self, thing: bytes) -> tuple[int, int]:
        """Its number, and when it was told; 0, 0 where it is not known."""
        tag, at = self._place(thing)
        slots = _SET.unpack_from(self._slots, at)
        for slot in range(0, len(slots), 3):
            if slots[slot] == tag:
                return slots[slot + 1], slots[slot + 2]
        return 0, 0

    def put(self, thing: bytes, number: int, time: int) -> None:
        """In its slot; in another one, for the oldest thing there, where it has none."""
        tag, at = self._place(thing)
        slots = _SET.unpack_from(self._slots, at)
        tags, times = slots[::3], slots[2::3]
        way = tags.index(tag) if tag in tags else times.index(min(times))
        _SLOT.pack_into(self._slots, at + way * _SLOT.size, tag, number, time)

    def _place(self, thing: bytes) -> tuple[bytes, int]:
        digest = hashlib.blake2b(thing, digest_size=20).digest()
        return digest[:16], int.from_bytes(digest[16:]) % self._sets * _SET.size


class Lock:
    """Of the kernel's, on a byte of a file: it ends with the process that holds it."""

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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, self._at)


class Memory:
    """`descriptor`: of the memory that another process has made; None: new."""

    def __init__(self, descriptor: int | None = None) -> None:
        ends = [RESPONSES * _SET.size, GUESSES * _SET.size, ROWS * ROW_BYTES]
        if descriptor is None:
            descriptor = os.memfd_create("fitserve")
            os.truncate(descriptor, sum(ends))
        self.descriptor = descriptor
        whole = memoryview(mmap.mmap(descriptor, sum(ends)))
        self.responses = Table(RESPONSES, whole[: ends[0]])
        self.guesses = Table(GUESSES, whole[ends[0] : ends[0] + ends[1]])
        self.accounts = whole[ends[0] + ends[1] :]

    def lock(self, at: int) -> Lock:
        """The lock of a number: those below `ROWS` are of accounts."""
        return Lock(self.descriptor, at)
