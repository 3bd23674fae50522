"""An engine's log file: read line by line while it grows, in bounded memory, and kept from filling the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import TracebackType

from gateway.hosts.host import MAX_LINE

CHUNK = 64 * 1024
LIMIT = 64 * 1024 * 1024
KEEP_HEAD = 1024 * 1024
KEEP_TAIL = 8 * 1024 * 1024

FALLOC_FL_KEEP_SIZE = 0x01
FALLOC_FL_PUNCH_HOLE = 0x02


class LogReader:
    """Reads from the first byte on. Holds one chunk and one line, however long the log is. Raises FileNotFoundError."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self._offset = 0
        self.partial = b""
        """The line without an end that was read last, cut like the others."""

    def __enter__(self) -> LogReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()

    def behind(self) -> bool:
        """Whether there is more to read."""
        return os.fstat(self._file.fileno()).st_size > self._offset

    def read(self) -> list[bytes]:
        """The lines that the next chunk completes."""
        dropped = self._skip_hole()
        data = os.pread(self._file.fileno(), CHUNK, self._offset)
        self._offset += len(data)
        *lines, partial = (self.partial + data).split(b"\n")
        self.partial = partial[:MAX_LINE]
        return dropped + [line[:MAX_LINE] for line in lines]

    def _skip_hole(self) -> list[bytes]:
        """Step over what `trim` has dropped, and say so."""
        try:
            data_at = os.lseek(self._file.fileno(), self._offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return []
            raise
        if data_at == self._offset:
            return []
        note = b"%d bytes of this log were dropped here to save disk space" % (data_at - self._offset)
        lines = [self.partial, note] if self.partial else [note]
        self._offset, self.partial = data_at, b""
        return lines


def trim(path: Path) -> bool:
    """Drop the middle of a log that takes more than LIMIT bytes of disk; whether it did.

    Punching a hole moves nothing: the engine goes on appending and readers keep their offsets. A file system that cannot
    do it keeps the whole log.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    if status.st_blocks * 512 <= LIMIT:
        return False
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file:
        hole = ctypes.c_int64(KEEP_HEAD), ctypes.c_int64(status.st_size - KEEP_TAIL - KEEP_HEAD)
        return bool(libc.fallocate(file.fileno(), FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, *hole) == 0)
