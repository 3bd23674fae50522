"""Pretended GPUs that processes share: all see the memory that one of them takes, as with real
ones.

A folder has a file for each process that uses a GPU, which holds its bytes; a process that is gone
uses nothing. Standard library only.
"""

from __future__ import annotations

import os
from pathlib import Path

MIB, GIB = 2**20, 2**30


class OutOfMemory(Exception):
    """`free` and `tried`: bytes."""

    def __init__(self, free: int, tried: int) -> None:
        super().__init__(f"{tried} bytes of {free}")
        self.free, self.tried = free, tried


class PretendedGpu:
    """One GPU as one process sees it."""

    def __init__(self, folder: Path, uuid: str, total: int, pid: int | None = None) -> None:
        self.total = total
        self._folder = folder / uuid
        self._folder.mkdir(parents=True, exist_ok=True)
        self._own_folder = self._folder / str(pid or os.getpid())

    def used_bytes(self) -> dict[int, int]:
        """Bytes by process."""
        sizes = {}
        for path in self._folder.iterdir():
            if not path.name.isdigit():
                continue
            if not alive(int(path.name)):
                path.unlink(missing_ok=True)
                continue
            text = path.read_text() if path.exists() else ""
            sizes[int(path.name)] = int(text or 0)
        return sizes

    @property
    def free(self) -> int:
        return self.total - sum(self.used_bytes().values())

    def take(self, count: int) -> None:
        """So many bytes more, or with a minus less. Raises OutOfMemory."""
        if count > (free := self.free):
            raise OutOfMemory(free, count)
        now = int(self._own_folder.read_text()) if self._own_folder.exists() else 0
        name = self._own_folder.with_name(f"{self._own_folder.name}.new")
        name.write_text(str(now + count))
        name.replace(self._own_folder)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
