"""The program that downloads: it gets a job on stdin, and says on stdout how far it is, and at the end what went wrong (`Said`).

It ends when its stdin closes, so it never outlives the gateway. `.complete` is written last and says what is there. What a Hub lists is foreign:
reading it has a limit of memory, and no file may become longer than the longest that is listed.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import re
import resource
import shutil
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gateway.catalog.catalog import weight_files
from gateway.catalog.download import MARKER, Job, Said, words
from gateway.catalog.files import Repository
from gateway.catalog.hub import Hub
from gateway.domain.units import GIB, MIB
from gateway.errors import BadModel

MARGIN_BYTES = GIB
REPORT_EVERY_S = 1.0
# For listing and index; what transfers files may need more.
_MEMORY_BYTES = 2 * GIB
# Beyond the longest file: what the library keeps of its own.
_SLACK_BYTES = 64 * MIB
# Below the gateway, whose streams go first.
_NICE = 10
_WORDS = 4000

_SMALL = re.compile(r"[^/]+\.(json|txt|jinja|model|tiktoken)|tokenizer[^/]*")
# The parts of a sentence-transformers model: 1_Pooling/config.json, 2_Dense/model.safetensors.
_MODULE = re.compile(r"\d+_\w+/[\w.-]+\.(json|safetensors)", re.ASCII)
_CODE = re.compile(r"[^/]+\.py")
# Pickles run code when they are loaded, so nothing but safetensors is ever fetched as weights.
_NEVER = (".bin", ".pt", ".pth", ".pkl", ".gguf")


def size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def main() -> None:
    job = Job(*json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_end_with_the_gateway, daemon=True).start()
    os.nice(_NICE)
    total, failure, hint = 0, None, ""
    try:
        with _little_memory():
            files = wanted(job)
        total = sum(files.values())
        make_room(Path(job.folder), files)
        _lower(resource.RLIMIT_FSIZE, max(files.values()) + _SLACK_BYTES)
        threading.Thread(target=_tell_progress, args=(Path(job.folder), files), daemon=True).start()
        fetch(job, files)
    except BadModel as error:
        failure, hint = error.message[:_WORDS], error.hint[:_WORDS]
    except MemoryError:
        failure = f"The listing or the index of {job.repo} takes more than {words(_MEMORY_BYTES)} of memory."
        hint = "No model needs so much: take another repository, or another Hub."
    _say(Said(total, total, True, failure, hint))


def _say(said: Said) -> None:
    # One write for a line, as two threads speak.
    os.write(1, json.dumps(said).encode() + b"\n")


def _tell_progress(folder: Path, files: dict[str, int]) -> None:
    total, before = sum(files.values()), -1
    while True:
        time.sleep(REPORT_EVERY_S)
        unfinished = folder.glob(".cache/huggingface/download/**/*.incomplete")
        done = min(sum(size_of(path) or 0 for path in (*(folder / name for name in files), *unfinished)), total)
        if done != before:
            _say(Said(done, total))
        before = done


@contextmanager
def _little_memory() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    _lower(resource.RLIMIT_AS, _MEMORY_BYTES)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _lower(what: int, most: int) -> None:
    """Where the gateway itself has a lower limit, that stays."""
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard))


def _end_with_the_gateway() -> None:
    # Not sys.stdin: a thread that waits in it makes the interpreter's own exit fail.
    while os.read(0, 4096):
        pass
    os._exit(1)


def wanted(job: Job) -> dict[str, int]:
    """Path -> bytes of what an engine needs of the repository."""
    hub = Hub(job.endpoint, job.token, Path(job.cache))
    listing = hub.resolve(job.repo, job.commit)
    weights = weight_files(Repository(hub, listing))
    if not weights:
        raise BadModel(f"{job.repo} holds no weights.", hint="Take a repository that has safetensors files.")

    def needed(path: str) -> bool:
        if path in weights:
            return True
        if path.endswith(_NEVER):
            return False
        return bool(_SMALL.fullmatch(path) or _MODULE.fullmatch(path) or (job.remote_code and _CODE.fullmatch(path)))

    return {path: size for path, size in listing.files.items() if needed(path)}


def make_room(folder: Path, files: dict[str, int]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise BadModel(
            f"{folder} cannot be made: {error.strerror}.", hint="Set FITSERVE_MODELS_DIR to a folder that can."
        ) from None
    needed = sum(size for path, size in files.items() if size_of(folder / path) != size) + MARGIN_BYTES
    if needed > free:
        raise BadModel(
            f"The download needs {words(needed)} (1 GiB of it as a margin), and {words(free)} are free at {folder}.",
            hint="Make room there, or set FITSERVE_MODELS_DIR to a larger disk.",
        )


def fetch(job: Job, files: dict[str, int]) -> None:
    from huggingface_hub import snapshot_download

    folder = Path(job.folder)
    hub = Hub(job.endpoint, job.token, Path(job.cache))
    with hub.explained(job.repo, job.commit), (folder / ".lock").open("w") as lock:
        # Two models with the same source share the folder: the second waits, then finds everything there.
        fcntl.flock(lock, fcntl.LOCK_EX)
        for orphan in folder.glob(".cache/huggingface/download/**/*.incomplete"):
            orphan.unlink()
        _drop_wrong(folder, files)
        snapshot_download(
            job.repo,
            revision=job.commit,
            local_dir=folder,
            cache_dir=job.cache,
            endpoint=job.endpoint,
            token=job.token or False,
            library_name="fitserve",
            allow_patterns=[glob.escape(path) for path in files],
        )
        if wrong := _drop_wrong(folder, files):
            raise BadModel(f"The download of {job.repo} is not whole: {', '.join(wrong[:5])}.", hint="Start it again.")
        _share(folder, files)
        draft = folder / f"{MARKER}.tmp"
        draft.write_text(json.dumps({"remote_code": job.remote_code, "files": files}))
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
