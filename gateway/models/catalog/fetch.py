"""The download program: a `Job` on stdin, `DownloadProgress` lines on stdout.

The program ends when its stdin closes, so it never outlives the gateway. A commit is noted as
complete last. A Hub's listing is foreign data: reading it has a memory limit, and no file may grow
beyond the longest listed file. Every file is compared with its digest once, also a file that
another program has downloaded.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import re
import resource
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from gateway.domain.units import GIB, MIB, format_bytes
from gateway.errors import BadModel
from gateway.models.catalog.catalog import weight_files
from gateway.models.catalog.commit_files import (
    allow_reading,
    check_disk_space,
    matches_digest,
    protect,
    stat_size,
)
from gateway.models.catalog.download import DownloadProgress, Job
from gateway.models.catalog.files import Repository
from gateway.models.catalog.hub import Hub
from gateway.models.catalog.hub_cache import HubCache, Listing

REPORT_INTERVAL_S = 1.0
# The limit while listing and index are read; transfers may need more.
_MEMORY_BYTES = 2 * GIB
# File size allowed beyond the longest listed file, for the library's own files.
_SLACK_BYTES = 64 * MIB
# Lower priority than the gateway, which serves streams.
_NICE = 10
_MAX_TEXT = 4000
_DIGEST_THREADS = 4

_SMALL_FILE = re.compile(r"[^/]+\.(json|txt|jinja|model|tiktoken)|tokenizer[^/]*")
# The parts of a sentence-transformers model: 1_Pooling/config.json, 2_Dense/model.safetensors.
_MODULE = re.compile(r"\d+_\w+/[\w.-]+\.(json|safetensors)", re.ASCII)
_CODE = re.compile(r"[^/]+\.py")
# Pickles run code when they are loaded, so only safetensors are downloaded as weights.
_REFUSED_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".gguf")


def main() -> None:
    """Download the files of the job on stdin, and report progress as lines of JSON."""
    job = Job.read(sys.stdin.buffer.readline())
    threading.Thread(target=_exit_at_end_of_stdin, daemon=True).start()
    os.nice(_NICE)
    total = 0
    failure = None
    hint = ""
    try:
        hub = Hub(job.endpoint, job.token, Path(job.notes), models=Path(job.models))
        with _memory_limit():
            listing = engine_files(job, hub)
        job = job._replace(commit=listing.commit)
        total = sum(listing.files.values())
        check_disk_space(hub.disk, listing)
        _lower_limit(resource.RLIMIT_FSIZE, max(listing.files.values()) + _SLACK_BYTES)
        fetch(job, hub, listing)
    except BadModel as error:
        failure = error.message[:_MAX_TEXT]
        hint = error.hint[:_MAX_TEXT]
    except MemoryError:
        failure = (
            f"The listing or the index of {job.repo} takes more than {format_bytes(_MEMORY_BYTES)}"
            " of memory."
        )
        hint = "No model needs so much. Choose another repository or another Hub."
    _write_progress(
        DownloadProgress(total, total, ended=True, failure=failure, hint=hint, commit=job.commit)
    )


def _write_progress(progress: DownloadProgress) -> None:
    # One write per line, as two threads write.
    os.write(1, json.dumps(progress).encode() + b"\n")


@contextmanager
def _reporting_progress(disk: HubCache, listing: Listing) -> Iterator[None]:
    """Report progress in the background, without the downloads of other programs."""
    end_event = threading.Event()
    blobs = disk.repository(listing.repo) / "blobs"
    foreign_paths = set(blobs.glob("*.incomplete"))

    def report() -> None:
        folder = disk.snapshot(listing.repo, listing.commit)
        total = sum(listing.files.values())
        last = -1
        while not end_event.wait(REPORT_INTERVAL_S):
            unfinished_paths = set(blobs.glob("*.incomplete")) - foreign_paths
            paths = (*(folder / name for name in listing.files), *unfinished_paths)
            done_bytes = min(sum(stat_size(path) or 0 for path in paths), total)
            if done_bytes != last:
                _write_progress(DownloadProgress(done_bytes, total))
            last = done_bytes

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end_event.set()
        thread.join()


@contextmanager
def _memory_limit() -> Iterator[None]:
    soft, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    _lower_limit(resource.RLIMIT_AS, _MEMORY_BYTES)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard_limit))


def _lower_limit(kind: int, limit: int) -> None:
    """Lower a resource limit; a limit of the gateway that is lower stays."""
    soft, hard_limit = resource.getrlimit(kind)
    resource.setrlimit(
        kind, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard_limit)
    )


def _exit_at_end_of_stdin() -> None:
    # A thread that waits in sys.stdin would make the interpreter's own exit fail.
    while os.read(0, 4096):
        pass
    os._exit(1)


def engine_files(job: Job, hub: Hub) -> Listing:
    """The files of the repository that an engine needs. Raises BadModel."""
    listing = hub.resolve(job.repo, job.commit or None)
    weights = weight_files(Repository(hub, listing))
    if not weights:
        raise BadModel(
            f"{job.repo} holds no weights.", hint="Choose a repository with safetensors files."
        )

    def is_needed(path: str) -> bool:
        if path in weights:
            return True
        if path.endswith(_REFUSED_SUFFIXES):
            return False
        return bool(
            _SMALL_FILE.fullmatch(path)
            or _MODULE.fullmatch(path)
            or (job.remote_code and _CODE.fullmatch(path))
        )

    return listing._replace(
        files={path: size for path, size in listing.files.items() if is_needed(path)}
    )


def fetch(job: Job, hub: Hub, listing: Listing) -> None:
    """Download and check the files of the listing, then note the commit as complete.

    Raises BadModel.
    """
    disk = hub.disk
    lock_file = disk.lock_file(job.repo, job.commit)
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with hub.explain_errors(job.repo, job.commit), lock_file.open("w") as lock:
        # Two models with the same source share the folder: the second waits for the first.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if disk.is_whole(job.repo, job.commit, remote_code=job.remote_code):
            return
        _drop_orphans(disk.repository(job.repo))
        if _remove_wrong_sizes(disk, listing):
            _transfer(job, hub, listing)
            if wrong_files := _remove_wrong_sizes(disk, listing):
                raise BadModel(
                    f"The download of {job.repo} is not complete: {', '.join(wrong_files[:5])}.",
                    hint="Start the download again.",
                )
        _check_digests(disk, listing)
        allow_reading(disk, listing)
        protect(disk, listing)
        disk.record_whole(job.repo, job.commit, listing.files, remote_code=job.remote_code)


def _transfer(job: Job, hub: Hub, listing: Listing) -> None:
    from huggingface_hub import snapshot_download

    with _reporting_progress(hub.disk, listing):
        snapshot_download(
            job.repo,
            revision=job.commit,
            cache_dir=job.models,
            endpoint=hub.address,
            token=hub.auth,
            library_name="fitserve",
            allow_patterns=[glob.escape(path) for path in listing.files],
        )


def _check_digests(disk: HubCache, listing: Listing) -> None:
    """Compare every file with its blob's name, or with the digest that the Hub listed.

    Raises BadModel, and removes the wrong file.
    """
    folder = disk.snapshot(listing.repo, listing.commit)
    total = sum(listing.files.values())
    done_bytes = 0
    with ThreadPoolExecutor(_DIGEST_THREADS) as pool:
        names = sorted(listing.files)
        for name, matches in zip(
            names,
            pool.map(lambda name: matches_digest(folder / name, listing.blobs.get(name)), names),
            strict=True,
        ):
            if not matches:
                _remove(disk, listing, name)
                raise BadModel(
                    f"{listing.repo}/{name} does not match its digest: its bytes changed during"
                    " the download or on the disk.",
                    hint="The file was removed. The next start downloads it again.",
                )
            done_bytes += listing.files[name]
            _write_progress(DownloadProgress(done_bytes, total, checking=True))


def _remove_wrong_sizes(disk: HubCache, listing: Listing) -> list[str]:
    """Remove files of a wrong size, because the library takes every existing file for complete.

    Returns a line for each of them, and for each missing file.
    """
    wrong_files = []
    for path, size in listing.files.items():
        current_size = stat_size(disk.snapshot(listing.repo, listing.commit) / path)
        if current_size != size:
            _remove(disk, listing, path)
            wrong_files.append(f"{path} has {current_size or 0} of {size} bytes")
    return wrong_files


def _remove(disk: HubCache, listing: Listing, name: str) -> None:
    """Remove a file of the commit, and its blob."""
    path = disk.snapshot(listing.repo, listing.commit) / name
    blobs = disk.repository(listing.repo) / "blobs"
    with suppress(OSError):
        (blobs / path.readlink().name).unlink()
    path.unlink(missing_ok=True)


def _drop_orphans(repository: Path) -> None:
    """Remove the incomplete files of killed downloads, which no later download resumes.

    The library holds a lock of the cache while it writes such a file.
    """
    for orphan in (repository / "blobs").glob("*.incomplete"):
        lock = (
            repository.parent / ".locks" / repository.name / f"{orphan.name.partition('.')[0]}.lock"
        )
        with suppress(OSError), lock.open("a") as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            orphan.unlink()


if __name__ == "__main__":
    main()
