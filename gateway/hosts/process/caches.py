"""Caches of compiled code for later starts: DATA/caches/KIND-VERSION/HASH/.

Each environment and each `LaunchSpec.cache` has a folder. Another environment of the same version,
another GPU kind, or a repository's code has another one, because the writer of a folder controls
the code of the next engine. The folder is also the HOME of its engines, for files that no variable
moves.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from gateway.domain.units import GIB

# The limit is for all versions together. A model with all its sizes takes some hundred MB, a
# version of FlashInfer up to some GB.
MAX_BYTES = 32 * GIB


class Caches:
    """Every method may raise OSError."""

    def __init__(self, data: Path, most_bytes: int = MAX_BYTES) -> None:
        self._folder = data / "caches"
        self._most_bytes = most_bytes

    def path(self, environment: Path, identity: str, cache: str) -> Path:
        """The folder of a start. `identity` changes when the environment is reinstalled."""
        return (
            self._folder
            / environment.name
            / hashlib.sha256(f"{identity} {cache}".encode()).hexdigest()[:16]
        )

    def make(self, path: Path, caches: Mapping[str, str]) -> dict[str, str]:
        """Make the folders. Returns the variables that name them."""
        for folder in (path, *(path / name for name in caches.values())):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.utime(path)  # the time of its last use
        return {
            "HOME": str(path),
            **{variable: str(path / name) for variable, name in caches.items()},
        }

    def trim(self, used_paths: Collection[Path]) -> None:
        """Remove the unused folders with the oldest use, until the rest is small enough."""
        sizes = {path: _size(path) for path in self._folder.glob("*/*")}
        for path in sorted(sizes, key=_last_use):
            if sum(sizes.values()) <= self._most_bytes:
                return
            if path not in used_paths:
                shutil.rmtree(path, ignore_errors=True)
                sizes[path] = 0

    def remove(self, environment: Path) -> None:
        """Remove all caches of one version."""
        shutil.rmtree(self._folder / environment.name, ignore_errors=True)


def is_empty(path: Path) -> bool:
    """Whether a folder holds no file, at any depth."""
    return not any(files for _, _, files in os.walk(path))


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    """Bytes of the files in a folder that may change meanwhile."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            with suppress(OSError):
                total += (Path(folder) / name).lstat().st_size
    return total
