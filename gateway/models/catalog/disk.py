"""Disk usage of weights and engines, and the removal of weights.

A separate program reads the whole disk, so that the gateway does not load the library of the Hub.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from gateway.errors import FitserveError
from gateway.worker_process import kill, spawn

_PROGRAM = "gateway.models.catalog.disk_program"
_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/([0-9a-f]{40})")


class DiskJob(NamedTuple):
    """The Hub's cache, the gateway's notes on it, the data folder.

    remove: pairs of repository and commit.
    """

    cache: str
    notes: str
    data: str
    remove: Sequence[tuple[str, str]] = ()


async def read_disk(job: DiskJob) -> Any:
    """The JSON answer of the disk program. Raises FitserveError."""
    child = await spawn(_PROGRAM, {"HF_HOME": job.notes, "HF_HUB_VERBOSITY": "error"}, errors=True)
    try:
        answer, errors = await child.communicate(json.dumps(job).encode())
    finally:
        # A client that leaves cancels the reading.
        await kill(child)
    if child.returncode != 0:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2][:300]
        raise FitserveError(
            f"Disk usage could not be read: {last}.",
            hint="Let the gateway's user read and write the cache and the data folder.",
        )
    return json.loads(answer)


def revision_bytes(snapshot: Path) -> int:
    """Bytes of the files of a commit, each once; 0 where it is not on the disk. Links that lead
    nowhere are left out."""
    sizes: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(snapshot):
        for name in names:
            with suppress(OSError):
                status = os.stat(os.path.join(folder, name))  # noqa: PTH116, PTH118 - as `os.walk`
                sizes[(status.st_dev, status.st_ino)] = status.st_size
    return sum(sizes.values())


def parse_revision(source: str) -> tuple[str, str] | None:
    """The repository and the commit of a snapshot folder in a Hub's cache; None: another path."""
    match = _SNAPSHOT.fullmatch(source)
    return (match[1].replace("--", "/", 1), match[2]) if match else None
