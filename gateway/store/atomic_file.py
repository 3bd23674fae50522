"""Files that are whole or absent, even after a power cut, and readable only by their owner."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, content: bytes, *, is_durable: bool = False) -> None:
    """Replace the file at `path`. Raises OSError, and then keeps the former content.

    is_durable: a power cut right after does not bring the former content back.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".tmp")
    with open(draft, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    if is_durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names of a folder's files to the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
