"""The program that brings files into the page cache.

The program's priority is that of other programs: on busy processors a nice one gained nothing.

Input: a line of JSON on stdin, `{"files": [path], "most_bytes": N}`. Output: a line of JSON with
the bytes that were read, and those that were in the cache. The program ends early when its stdin
ends. Nothing of this package is imported, as the program starts together with an engine.

A call of posix_fadvise reads no more than one read-ahead of the kernel, 128 KiB on many disks
(force_page_cache_ra in mm/readahead.c of Linux 6). So a step is no longer, and many are under way.
Holes of sparse files cost nothing and are left out.
"""

from __future__ import annotations

import json
import os
import select
import stat
import sys
from collections import deque
from collections.abc import Iterator

STEP = 128 * 1024
BLOCK = 2 * 1024 * 1024
"""Bytes between two looks at stdin, and at the cache."""
BLOCKS_AHEAD = 16


def main() -> None:
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):  # cancelled before the job came
        return
    job = json.loads(line)
    reader = CacheReader(job["most_bytes"])
    for path in job["files"]:
        if not reader.read_file(path):
            break
    json.dump({"read": reader.read, "cached": reader.cached_bytes}, sys.stdout)


class CacheReader:
    """Bytes that were read, and found in the cache, of at most `most_bytes` together."""

    def __init__(self, most_bytes: int) -> None:
        self.read = self.cached_bytes = 0
        self._most_bytes = most_bytes

    def read_file(self, path: str) -> bool:
        """Bring a file into the page cache. Returns whether the next file is due."""
        try:
            # A named pipe would block without O_NONBLOCK.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            status = os.fstat(descriptor)
            return not stat.S_ISREG(status.st_mode) or self._read(descriptor, status.st_size)
        except OSError:
            # The engine reads the same file, and reports its error.
            return True
        finally:
            os.close(descriptor)

    def _read(self, descriptor: int, size: int) -> bool:
        pending_offsets: deque[int] = deque()
        # Each look at the cache would make the kernel read ahead otherwise.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for begin, end in _blocks(descriptor, size):
            if self.read + self.cached_bytes + end - begin > self._most_bytes or _is_cancelled():
                return False
            if _is_cached(descriptor, end - 1):
                self.cached_bytes += end - begin
                continue
            for offset in range(begin, end, STEP):
                length = min(STEP, end - offset)
                os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_WILLNEED)
            self.read += end - begin
            pending_offsets.append(end - 1)
            if len(pending_offsets) >= BLOCKS_AHEAD:
                os.pread(descriptor, 1, pending_offsets.popleft())
        for offset in pending_offsets:
            os.pread(descriptor, 1, offset)
        return True


def _blocks(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each block of data in a file."""
    end = 0
    while end < size:
        try:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError:  # only a hole is left
            return
        end = os.lseek(descriptor, begin, os.SEEK_HOLE)
        for offset in range(begin, end, BLOCK):
            yield offset, min(offset + BLOCK, end)


def _is_cached(descriptor: int, offset: int) -> bool:
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:  # not in the cache, or a file system that does not report it
        return False


def _is_cancelled() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


if __name__ == "__main__":
    main()
