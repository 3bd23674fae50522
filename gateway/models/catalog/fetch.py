"""The program that downloads: it gets a job on stdin, and says on stdout how far it is, and at the
end what went wrong (`Said`).

It ends when its stdin closes, so it never outlives the gateway. That a commit is whole is noted
last. What a Hub lists is foreign: reading it has a limit of memory, and no file may become longer
than the longest that is listed. Every file is compared with its digest, once, also one that another
program has brought here.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import re
import resource
import shutil
import stat
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from gateway.domain.units import GIB, MIB, words
from gateway.errors import BadModel
from gateway.models.catalog.catalog import weight_files
from gateway.models.catalog.download import Job, Said
from gateway.models.catalog.files import Repository
from gateway.models.catalog.hub import Hub
from gateway.models.catalog.hub_cache import HubCache, Listing

MARGIN_BYTES = GIB
REPORT_EVERY_S = 1.0
# For listing and index; what transfers files may need more.
_MEMORY_BYTES = 2 * GIB
# Beyond the longest file: what the library keeps of its own.
_SLACK_BYTES = 64 * MIB
# Below the gateway, whose streams go first.
_NICE = 10
_WORDS = 4000
_DIGESTS_AT_ONCE = 4

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
        hub = Hub(job.endpoint, job.token, Path(job.notes), models=Path(job.models))
        with _little_memory():
            wanted = needed(job, hub)
        job = job._replace(commit=wanted.commit)
        total = sum(wanted.files.values())
        make_room(hub.disk, wanted)
        _lower(resource.RLIMIT_FSIZE, max(wanted.files.values()) + _SLACK_BYTES)
        fetch(job, hub, wanted)
    except BadModel as error:
        failure, hint = error.message[:_WORDS], error.hint[:_WORDS]
    except MemoryError:
        failure = (
            f"The listing or the index of {job.repo} takes more than {words(_MEMORY_BYTES)} of"
            " memory."
        )
        hint = "No model needs so much: take another repository, or another Hub."
    _say(Said(total, total, True, failure, hint, commit=job.commit))


def _say(said: Said) -> None:
    # One write for a line, as two threads speak.
    os.write(1, json.dumps(said).encode() + b"\n")


@contextmanager
def _telling_progress(disk: HubCache, wanted: Listing) -> Iterator[None]:
    """What other programs are bringing into the cache does not count."""
    ended, blobs = threading.Event(), disk.repository(wanted.repo) / "blobs"
    others = set(blobs.glob("*.incomplete"))

    def tell() -> None:
        folder, total, before = (
            disk.snapshot(wanted.repo, wanted.commit),
            sum(wanted.files.values()),
            -1,
        )
        while not ended.wait(REPORT_EVERY_S):
            unfinished = set(blobs.glob("*.incomplete")) - others
            done = min(
                sum(
                    size_of(path) or 0
                    for path in (*(folder / name for name in wanted.files), *unfinished)
                ),
                total,
            )
            if done != before:
                _say(Said(done, total))
            before = done

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


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


def needed(job: Job, hub: Hub) -> Listing:
    """What an engine needs of the repository."""
    listing = hub.resolve(job.repo, job.commit or None)
    weights = weight_files(Repository(hub, listing))
    if not weights:
        raise BadModel(
            f"{job.repo} holds no weights.", hint="Take a repository that has safetensors files."
        )

    def wanted(path: str) -> bool:
        if path in weights:
            return True
        if path.endswith(_NEVER):
            return False
        return bool(
            _SMALL.fullmatch(path)
            or _MODULE.fullmatch(path)
            or (job.remote_code and _CODE.fullmatch(path))
        )

    return listing._replace(
        files={path: size for path, size in listing.files.items() if wanted(path)}
    )


def make_room(disk: HubCache, wanted: Listing) -> None:
    """Raises BadModel where the disk has no room for what is not there yet; files that did not
    change since another commit are."""
    folder, blobs, cache = (
        disk.snapshot(wanted.repo, wanted.commit),
        disk.repository(wanted.repo) / "blobs",
        disk.repository(wanted.repo).parent,
    )

    def is_here(path: str, size: int) -> bool:
        blob = wanted.blobs.get(path)
        return size_of(folder / path) == size or (
            blob is not None and size_of(blobs / blob) == size
        )

    missing = sum(size for path, size in wanted.files.items() if not is_here(path, size))
    if not missing:
        return
    try:
        cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(cache).free
    except OSError as error:
        raise BadModel(
            f"{cache} cannot be made: {error.strerror}.",
            hint="Set FITSERVE_MODELS_DIR to a folder that can.",
        ) from None
    if missing + MARGIN_BYTES > free:
        raise BadModel(
            f"The download needs {words(missing + MARGIN_BYTES)} (1 GiB of it as a margin), and"
            f" {words(free)} are free at {cache}.",
            hint=(
                "Make room there (`fitserve df` says what nothing uses), or set FITSERVE_MODELS_DIR"
                " to a larger disk."
            ),
        )


def fetch(job: Job, hub: Hub, wanted: Listing) -> None:
    disk = hub.disk
    lock_file = disk.lock_file(job.repo, job.commit)
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with hub.explained(job.repo, job.commit), lock_file.open("w") as lock:
        # Two models with the same source share the folder: the second waits, then finds everything
        # there.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if disk.is_whole(job.repo, job.commit, remote_code=job.remote_code):
            return
        _drop_orphans(disk.repository(job.repo))
        if _drop_wrong(disk, wanted):
            _bring(job, disk, wanted)
            if wrong := _drop_wrong(disk, wanted):
                raise BadModel(
                    f"The download of {job.repo} is not whole: {', '.join(wrong[:5])}.",
                    hint="Start it again.",
                )
        _check(disk, wanted)
        _share(disk, wanted)
        _protect(disk, wanted)
        disk.note_whole(job.repo, job.commit, wanted.files, remote_code=job.remote_code)


def _bring(job: Job, disk: HubCache, wanted: Listing) -> None:
    from huggingface_hub import snapshot_download

    with _telling_progress(disk, wanted):
        snapshot_download(
            job.repo,
            revision=job.commit,
            cache_dir=job.models,
            endpoint=job.endpoint,
            token=job.token or False,
            library_name="fitserve",
            allow_patterns=[glob.escape(path) for path in wanted.files],
        )


def _check(disk: HubCache, wanted: Listing) -> None:
    """Every file has the digest that its blob is named for, or that the Hub listed. Raises
    BadModel; a wrong file is removed."""
    folder, total, done = disk.snapshot(wanted.repo, wanted.commit), sum(wanted.files.values()), 0
    with ThreadPoolExecutor(_DIGESTS_AT_ONCE) as pool:
        names = sorted(wanted.files)
        for name, right in zip(
            names,
            pool.map(lambda name: is_right(folder / name, wanted.blobs.get(name)), names),
            strict=True,
        ):
            if not right:
                _drop(disk, wanted, name)
                raise BadModel(
                    f"{wanted.repo}/{name} is not what its digest says: it was changed on its way"
                    " or on the disk.",
                    hint="It was removed, and is downloaded again with the next start.",
                )
            done += wanted.files[name]
            _say(Said(done, total, checking=True))


def is_right(path: Path, digest: str | None) -> bool:
    """A blob is named by SHA-256, or as git names it. What says neither is taken as it is."""
    digest = digest or (path.readlink().name if path.is_symlink() else "")
    size = path.stat().st_size
    with path.open("rb") as file:
        if len(digest) == len(hashlib.sha256().hexdigest()):
            return hashlib.file_digest(file, "sha256").hexdigest() == digest
        if len(digest) == len(hashlib.sha1(usedforsecurity=False).hexdigest()):
            start = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
            return hashlib.file_digest(file, lambda: start).hexdigest() == digest
    return True


def _share(disk: HubCache, wanted: Listing) -> None:
    """Let all users read the files, and pass the folders on the way from the repository's: an
    engine's container runs as another user, without the
    right to read what is closed to that user. On the host itself the cache's folder keeps others
    out, or is its owner's to guard.
    """
    repository, folder = disk.repository(wanted.repo), disk.snapshot(wanted.repo, wanted.commit)
    passed = {repository, repository / "blobs", folder.parent, folder}
    passed |= {
        parent
        for name in wanted.files
        for parent in (folder / name).parents
        if folder in parent.parents
    }
    for path, mode in (
        *((path, 0o755) for path in passed),
        *((folder / name, 0o644) for name in wanted.files),
    ):
        # What another user of the cache owns has that user's rights.
        with suppress(OSError):
            had = stat.S_IMODE(path.stat().st_mode)
            if had & mode != mode:
                path.chmod(had | mode)


def _protect(disk: HubCache, wanted: Listing) -> None:
    """A commit without a name is removed by `hf cache prune`."""
    ref = disk.repository(wanted.repo) / "refs" / "fitserve" / wanted.commit
    with suppress(OSError):
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(wanted.commit)


def _drop_wrong(disk: HubCache, wanted: Listing) -> list[str]:
    """Remove files of a wrong size, because the library takes each file that exists for a whole
    one. Returns a line for each, and for each missing file."""
    wrong = []
    for path, size in wanted.files.items():
        there = size_of(disk.snapshot(wanted.repo, wanted.commit) / path)
        if there != size:
            _drop(disk, wanted, path)
            wrong.append(f"{path} has {there or 0} of {size} bytes")
    return wrong


def _drop(disk: HubCache, wanted: Listing, name: str) -> None:
    """The file of the commit, and its blob."""
    path, blobs = (
        disk.snapshot(wanted.repo, wanted.commit) / name,
        disk.repository(wanted.repo) / "blobs",
    )
    with suppress(OSError):
        (blobs / path.readlink().name).unlink()
    path.unlink(missing_ok=True)


def _drop_orphans(repository: Path) -> None:
    """Remove what killed downloads left, which no later one goes on with. The library holds a lock
    of the cache while it writes one."""
    for orphan in (repository / "blobs").glob("*.incomplete"):
        lock = (
            repository.parent / ".locks" / repository.name / f"{orphan.name.partition('.')[0]}.lock"
        )
        with suppress(OSError), lock.open("a") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            orphan.unlink()


if __name__ == "__main__":
    main()
