"""Engine logs as files: DATA_DIR/logs/INSTANCE.log, kept after the engine ends.

A process writes its own file; the watcher copies the log of a container. At half of the size limit
the file becomes INSTANCE.log.1, so the end is never lost. The log of an engine of a cluster, with
the lines of all ranks, is copied to DATA_DIR/logs/cluster/: the first folder has the engines of
this machine.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

LIMIT_BYTES = 64 * 1024 * 1024
_POLL_S = 0.2
_READ_BYTES = 256 * 1024


def log_path(data: Path, instance: str, *, is_in_cluster: bool = False) -> Path:
    folder = data / "logs"
    return (folder / "cluster" if is_in_cluster else folder) / f"{instance}.log"


class LogCopy:
    """Writes lines to an empty log file: a copy always begins with the log's first line.

    A disk that takes no line never stops the reader of the log: such lines are left out, and a note
    counts them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._size = self._missing_bytes = 0
        with suppress(OSError):
            self._file = self._new_file()

    def write(self, line: bytes) -> None:
        note = (
            b"(lines without room on the disk: %d)\n" % self._missing_bytes
            if self._missing_bytes
            else b""
        )
        try:
            if self._file is None:
                self._file = self._new_file()
            elif self._size > LIMIT_BYTES // 2:
                self._path.replace(self._path.with_suffix(".log.1"))
                self.close()
                self._file = self._new_file()
            self._size += self._file.write(note + line + b"\n") or 0
            self._missing_bytes = 0
        except OSError:
            self._missing_bytes += 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _new_file(self) -> BinaryIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._size = 0
        return self._path.open("wb", buffering=0)


async def read_log(
    path: Path, *, tail: int | None, follow: Callable[[], bool] | None
) -> AsyncGenerator[bytes, None]:
    """The log in pieces: all of it, or its last `tail` lines.

    While `follow()` is true, new lines follow, also of a log that does not exist yet.
    """
    while not await asyncio.to_thread(path.exists):
        if follow is None or not follow():
            return
        await asyncio.sleep(_POLL_S)
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        if tail is not None:
            yield b"".join(await asyncio.to_thread(_last_lines, file, tail))
        while True:
            is_followed = follow is not None and follow()
            if os.fstat(file.fileno()).st_size < file.tell():
                # The file was cut because it grew too large: continue after the cut.
                file.seek(0, os.SEEK_END)
            while piece := await asyncio.to_thread(file.read, _READ_BYTES):
                yield piece
            if not is_followed:
                return
            await asyncio.sleep(_POLL_S)


def remove_logs(data: Path, instance: str) -> None:
    for in_cluster in (False, True):
        path = log_path(data, instance, is_in_cluster=in_cluster)
        path.unlink(missing_ok=True)
        path.with_suffix(".log.1").unlink(missing_ok=True)


def remove_old_logs(data: Path, instances: Collection[str], age_s: float) -> None:
    """Remove logs of this machine's engines that nobody has written to for `age_s`.

    instances: their logs stay. A gateway of the cluster has copies of all.
    """
    oldest_at = time.time() - age_s
    for path in (data / "logs").glob("*.log*"):
        with suppress(OSError):
            if path.name.partition(".log")[0] not in instances and path.stat().st_mtime < oldest_at:
                path.unlink()


def _last_lines(file: BinaryIO, count: int) -> deque[bytes]:
    return deque(file, maxlen=count)
