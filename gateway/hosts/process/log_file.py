"""The log file of an engine: read line by line as it grows, and kept from filling the disk."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from gateway.hosts.host import MAX_LINE

CHUNK = 64 * 1024
LIMIT = 32 * 1024 * 1024
KEEP = 1024 * 1024
"""Bytes of the beginning, with the engine's set-up, that a trimmed log keeps."""


class LogFileReader:
    """Reads from the first byte on. Holds one chunk and one line, however long the log is. Raises
    FileNotFoundError."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self._offset = 0
        self.partial = b""
        """The unfinished last line, cut like the others."""

    def __enter__(self) -> LogFileReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._file.close()

    def has_more(self) -> bool:
        """Whether there is something to read."""
        return os.fstat(self._file.fileno()).st_size != self._offset

    def read(self) -> list[bytes]:
        """The lines that the next chunk completes."""
        if os.fstat(self._file.fileno()).st_size < self._offset:
            # The file was trimmed. More than the kept part was read before, so all bytes after that
            # part are new.
            self._offset = min(self._offset, KEEP)
            self.partial = b""
        data = os.pread(self._file.fileno(), CHUNK, self._offset)
        self._offset += len(data)
        *lines, partial = (self.partial + data).split(b"\n")
        self.partial = partial[:MAX_LINE]
        return [line[:MAX_LINE] for line in lines]


def trim(path: Path) -> bool:
    """Cut a log over LIMIT to its first KEEP bytes; its last LIMIT bytes go to NAME.log.1. Returns
    whether it was cut.

    The engine goes on appending to the same file. Lines between copy and cut are lost. If the disk
    has no room for a copy, all but the beginning is lost. Both are better than a full disk.
    """
    try:
        if path.stat().st_size <= LIMIT:
            return False
    except FileNotFoundError:
        return False
    older_path = path.with_name(f"{path.name}.1")
    try:
        with path.open("rb") as log, older_path.open("wb") as copy:
            log.seek(-LIMIT, os.SEEK_END)
            shutil.copyfileobj(log, copy)
    except OSError:
        with suppress(OSError):
            older_path.unlink(missing_ok=True)
    try:
        os.truncate(path, KEEP)
    except OSError:  # of a disk that became read-only
        return False
    return True
