"""The program that downloads: it gets a job on stdin and answers on stdout: null, or {message, hint} of what went wrong.

It ends when its stdin closes, so it never outlives the gateway. `.complete` is written last and says what is there.
It imports little, as it starts once per download.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import stat
import sys
import threading
from pathlib import Path
from typing import NamedTuple

from gateway.catalog.hub import Hub
from gateway.errors import BadModel

MARKER = ".complete"


class Job(NamedTuple):
    """What to fetch. It comes on stdin, so that the token shows in no process list."""

    endpoint: str | None
    token: str | None
    cache: str
    repo: str
    commit: str
    folder: str
    files: dict[str, int]
    remote_code: bool


def size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def main() -> None:
    job = Job(*json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_end_with_the_gateway, daemon=True).start()
    try:
        fetch(job)
        failure = None
    except BadModel as error:
        failure = {"message": error.message, "hint": error.hint}
    sys.stdout.write(json.dumps(failure))


def _end_with_the_gateway() -> None:
    # Not sys.stdin: a thread that waits in it makes the interpreter's own exit fail.
    while os.read(0, 4096):
        pass
    os._exit(1)


def fetch(job: Job) -> None:
    from huggingface_hub import snapshot_download

    folder = Path(job.folder)
    hub = Hub(job.endpoint, job.token, Path(job.cache))
    with hub.explained(job.repo, job.commit), (folder / ".lock").open("w") as lock:
        # Two models with the same source share the folder: the second waits, then finds everything there.
        fcntl.flock(lock, fcntl.LOCK_EX)
        for orphan in folder.glob(".cache/huggingface/download/**/*.incomplete"):
            orphan.unlink()
        _drop_wrong(folder, job.files)
        snapshot_download(
            job.repo,
            revision=job.commit,
            local_dir=folder,
            cache_dir=job.cache,
            endpoint=job.endpoint,
            token=job.token or False,
            library_name="fitserve",
            allow_patterns=[glob.escape(path) for path in job.files],
        )
        if wrong := _drop_wrong(folder, job.files):
            raise BadModel(f"The download of {job.repo} is not whole: {', '.join(wrong[:5])}.", hint="Start it again.")
        _share(folder, job.files)
        draft = folder / f"{MARKER}.tmp"
        draft.write_text(json.dumps({"remote_code": job.remote_code, "files": job.files}))
        draft.replace(folder / MARKER)


def _share(folder: Path, files: dict[str, int]) -> None:
    """Let all users read the files, and pass the folders on the way from ROOT: an engine's container runs as another user, without the
    right to read what is closed to that user. On the host itself DATA_DIR around the files keeps others out; a folder that FITSERVE_MODELS_DIR
    names is the operator's to guard."""
    passed = {
        folder.parent,
        folder,
        *(parent for name in files for parent in (folder / name).parents if folder in parent.parents),
    }
    for path, wanted in (*((path, 0o755) for path in passed), *((folder / name, 0o644) for name in files)):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode & wanted != wanted and not path.is_symlink():
            path.chmod(mode | wanted)


def _drop_wrong(folder: Path, files: dict[str, int]) -> list[str]:
    """Remove files of a wrong size, because the library takes each file that exists for a whole one. Returns a line for each, and for each missing file."""
    wrong = []
    for path, size in files.items():
        there = size_of(folder / path)
        if there != size:
            (folder / path).unlink(missing_ok=True)
            wrong.append(f"{path} has {there or 0} of {size} bytes")
    return wrong


if __name__ == "__main__":
    main()
