"""Weights brought into the page cache while their engine imports its code.

An engine reads its weights after its imports, page by page and in the order of their names. Another
process reads the same files before, with many reads under way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gateway.errors import BadModel
from gateway.models.catalog.catalog import SAFETENSORS_FORMATS, weight_files
from gateway.models.catalog.files import Folder
from gateway.worker_process import kill, spawn

_PROGRAM = "gateway.models.catalog.page_cache_program"


class ReadAhead(NamedTuple):
    """Bytes that were read from the disk, and those that were in the page cache before."""

    read: int = 0
    cached: int = 0


def files_of_weights(folder: Path, prefix: str, load_format: str) -> list[Path]:
    """The files that an engine reads, in its order.

    prefix: the beginning of the names of the only files that it reads
        (`EngineKind.weights_prefix`).
    load_format: the engine's loader; "": its default. A loader that does not read safetensors
        through the page cache has no such files, and neither has a broken folder.
    """
    if load_format not in SAFETENSORS_FORMATS:
        return []
    try:
        files = Folder(folder)
        names = weight_files(files)
    except BadModel:  # the engine says so too
        return []
    if prefix and load_format in ("", "auto"):
        folder_names = [name for name in files.names if name.startswith(prefix)]
        names = [name for name in folder_names if name.endswith(".safetensors")] or names
    return [folder / name for name in sorted(names)]


async def read_ahead(files: Iterable[Path], most_bytes: int) -> ReadAhead:
    """Bring the files into the page cache, first to last, until most_bytes are there.

    Cancelled, nothing is read any more. A failure costs only the gain.
    """
    paths = [str(path) for path in files]
    if not paths or most_bytes <= 0:
        return ReadAhead()
    try:
        child = await spawn(_PROGRAM, {})
    except OSError:
        return ReadAhead()
    assert child.stdin is not None  # noqa: S101 - it is a pipe
    assert child.stdout is not None  # noqa: S101 - it is a pipe
    try:
        with suppress(OSError):
            job = {"files": paths, "most_bytes": most_bytes}
            child.stdin.write(json.dumps(job).encode() + b"\n")
            await child.stdin.drain()
        answer = await child.stdout.readline()
        return ReadAhead(**json.loads(answer)) if answer.strip() else ReadAhead()
    finally:
        # A long job may not be written yet, and a pipe is closed only after its last byte.
        if not child.stdin.transport.is_closing():
            child.stdin.transport.abort()
        await kill(child)
