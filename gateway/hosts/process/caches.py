"""What engines compile, kept for their next start: DATA/caches/KIND-VERSION/HASH/, one folder for
each environment and each kind of start that may
share it (`LaunchSpec.cache`). Another environment of the same version, another kind of GPU, or the
code of a repository has another one: whoever writes there decides what the next engine runs. It is
the HOME of its engines too, where they keep what no variable moves.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from gateway.domain.units import GIB

# Of all versions: a model with all its sizes takes a few hundred MB, a version of FlashInfer up to
# some GB.
MOST_BYTES = 32 * GIB


class Caches:
    """Every method may raise OSError."""

    def __init__(self, data: Path, most_bytes: int = MOST_BYTES) -> None:
        self._folder = data / "caches"
        self._most_bytes = most_bytes

    def path(self, environment: Path, identity: str, cache: str) -> Path:
        """The folder of a start. identity: of the environment, which is another one when it was
        installed anew."""
        return (
            self._folder
            / environment.name
            / hashlib.sha256(f"{identity} {cache}".encode()).hexdigest()[:16]
        )

    def make(self, path: Path, caches: Mapping[str, str]) -> dict[str, str]:
        """The folders, and the variables that name them."""
        for folder in (path, *(path / name for name in caches.values())):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.utime(path)  # its last use
        return {
            "HOME": str(path),
            **{variable: str(path / name) for variable, name in caches.items()},
        }

    def trim(self, used: Collection[Path]) -> None:
        """Removes what was not used for longest and is in no use now, until the rest is small
        enough."""
        left = {path: _size(path) for path in self._folder.glob("*/*")}
        for path in sorted(left, key=_last_use):
            if sum(left.values()) <= self._most_bytes:
                return
            if path not in used:
                shutil.rmtree(path, ignore_errors=True)
                left[path] = 0

    def remove(self, environment: Path) -> None:
        """All of one version."""
        shutil.rmtree(self._folder / environment.name, ignore_errors=True)


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    """Of the files in it, as far as they stay while it is counted."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            with suppress(OSError):
                total += (Path(folder) / name).lstat().st_size
    return total
