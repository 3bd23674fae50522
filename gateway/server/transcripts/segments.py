"""Files of encrypted transcripts: one transcript a line, and whole files are deleted.

A line is written in one step, so it survives the death of any process. A line that was cut off has
no end, and is not read.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_NAME = re.compile(r"(\d{13})-[0-9a-f]{8}\.transcripts", re.ASCII)
_MAX_SEGMENT_BYTES = 16 * 1024 * 1024
# Parts of the size and of the time of all transcripts that one file may have.
_SIZE_PARTS = 16
_TIME_PARTS = 24
# Names of files have milliseconds. A file may begin this much after the clock, to be the newest.
_STEP_S = 0.001
_SKEW_S = 1.0


class Segment(NamedTuple):
    """A file. started_at: Unix time of its first transcript."""

    path: Path
    started_at: float
    size: int

    @property
    def name(self) -> str:
        return self.path.stem


class Line(NamedTuple):
    """A line of a file, without its end."""

    offset: int
    token: bytes


def list_segments(folder: Path) -> list[Segment]:
    """The files, the oldest first."""
    segments = []
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match is None:
                continue
            with suppress(FileNotFoundError):
                size = entry.stat().st_size
                segments.append(Segment(Path(entry.path), int(match[1]) / 1000, size))
    return sorted(segments, key=lambda segment: segment.path.name)


def read_lines(segment: Segment) -> list[Line]:
    """The complete lines of a file, the oldest first; none where it was deleted."""
    try:
        data = segment.path.read_bytes()
    except FileNotFoundError:
        return []
    lines = []
    offset = 0
    while (end := data.find(b"\n", offset)) >= 0:
        lines.append(Line(offset, data[offset:end]))
        offset = end + 1
    return lines


def read_line(folder: Path, name: str, offset: int) -> bytes | None:
    """The line of a file at a place; None: there is none."""
    path = folder / f"{name}.transcripts"
    if not _NAME.fullmatch(path.name):
        return None
    try:
        with path.open("rb") as file:
            file.seek(max(0, offset - 1))
            if offset and file.read(1) != b"\n":
                return None
            line = file.readline(_MAX_SEGMENT_BYTES)
    except OSError:
        return None
    return line[:-1] if line.endswith(b"\n") else None


class SegmentWriter:
    """Appends lines, and deletes the oldest files beyond a size and an age.

    keep_s: the age. A file is deleted when its first line reaches it.
    now: the Unix time.
    """

    def __init__(
        self, folder: Path, max_bytes: int, keep_s: float, now: Callable[[], float] = time.time
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._now = now
        self._segment_bytes = min(_MAX_SEGMENT_BYTES, max_bytes // _SIZE_PARTS)
        self._descriptor = -1
        self._path: Path | None = None
        self._size = 0
        self._started_at = 0.0
        self._total_bytes = 0
        self._is_dirty = False

    def append(self, token: bytes) -> None:
        """Write a line. Raises OSError, and then leaves no part of the line."""
        line = token + b"\n"
        if self._descriptor < 0 or self._is_full(len(line)):
            self._start_segment()
        if self._total_bytes + len(line) > self._max_bytes:
            self.sweep(len(line))
        written_bytes = 0
        try:
            while written_bytes < len(line):
                written_bytes += os.write(self._descriptor, line[written_bytes:])
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            self.close()
            raise
        self._size += len(line)
        self._total_bytes += len(line)
        self._is_dirty = True

    def sweep(self, needed_bytes: int = 0) -> None:
        """Delete files that are too old, and the oldest ones until all fit."""
        segments = list_segments(self._folder)
        total = sum(segment.size for segment in segments) + needed_bytes
        oldest_at = self._now() - self._keep_s
        for segment in segments:
            is_old = segment.started_at <= oldest_at
            if segment.path == self._path and is_old:
                self.close()
            elif segment.path == self._path or not (is_old or total > self._max_bytes):
                continue
            segment.path.unlink(missing_ok=True)
            total -= segment.size
        self._total_bytes = total - needed_bytes

    def sync(self) -> None:
        """Bring the lines to the disk, so that they survive a power cut."""
        if self._is_dirty and self._descriptor >= 0:
            os.fdatasync(self._descriptor)
            self._is_dirty = False

    def close(self) -> None:
        """Close the file. The next line begins another one."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        self._path = None

    def _is_full(self, line_bytes: int) -> bool:
        age_s = self._now() - self._started_at
        return (
            self._size + line_bytes > self._segment_bytes
            or not -_SKEW_S <= age_s <= self._keep_s / _TIME_PARTS
        )

    def _start_segment(self) -> None:
        self.close()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._started_at = self._now()
        segments = list_segments(self._folder)
        # Files that begin in one millisecond keep their order.
        next_at = segments[-1].started_at + _STEP_S if segments else 0.0
        if 0 < next_at - self._started_at < _SKEW_S:
            self._started_at = next_at
        name = f"{round(self._started_at * 1000):013d}-{secrets.token_hex(4)}.transcripts"
        path = self._folder / name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        self._path = path
        self._size = 0
        self.sweep()
