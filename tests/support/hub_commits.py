"""Commits in a cache of the Hub, as a download leaves them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from gateway.models.catalog.hub_cache import HubCache

REPO = "org/name"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def disk_of(data: Path) -> HubCache:
    """The cache and its notes in a data folder."""
    return HubCache(data / "models", data / "hub")


def put_commit(disk: HubCache, files: Mapping[str, bytes], *, remote_code: bool = False) -> Path:
    """Write a commit whose digests were checked. Returns the folder of its files."""
    folder = disk.snapshot(REPO, COMMIT)
    for name, content in files.items():
        blob = disk.repository(REPO) / "blobs" / hashlib.sha256(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(blob, path.parent))
    sizes = {name: len(content) for name, content in files.items()}
    disk.record_whole(REPO, COMMIT, sizes, remote_code=remote_code)
    return folder
