"""What weights and engines take on the disk, and the removal of weights. A program of its own
looks: the gateway holds no library of the Hub."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from gateway.errors import FitserveError
from gateway.worker_process import started

_PROGRAM = "gateway.models.catalog.disk_program"
_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/([0-9a-f]{40})")


class DiskJob(NamedTuple):
    """What to look at: the Hub's cache, our notes on it, the data folder. remove: (repository,
    commit) that are to go."""

    cache: str
    notes: str
    data: str
    remove: Sequence[tuple[str, str]] = ()


async def look(job: DiskJob) -> Any:
    """What the program answers. Raises FitserveError."""
    child = await started(
        _PROGRAM, {"HF_HOME": job.notes, "HF_HUB_VERBOSITY": "error"}, errors=True
    )
    said, words = await child.communicate(json.dumps(job).encode())
    if child.returncode != 0:
        last = words.decode(errors="replace").strip().rpartition("\n")[2][:300]
        raise FitserveError(
            f"The disk could not be looked at: {last}.",
            hint="Let the gateway's user read and write there.",
        )
    return json.loads(said)


def revision_of(source: str) -> tuple[str, str] | None:
    """The repository and the commit whose folder in a Hub's cache this is."""
    found = _SNAPSHOT.fullmatch(source)
    return (found[1].replace("--", "/", 1), found[2]) if found else None
