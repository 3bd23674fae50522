"""Files of a commit in the Hub's cache: their sizes, digests and rights, and space for them."""

from __future__ import annotations

import hashlib
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gateway.domain.units import GIB, format_bytes
from gateway.errors import BadModel
from gateway.models.catalog.hub_cache import HubCache, Listing

MARGIN_BYTES = GIB


def stat_size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def check_disk_space(
    disk: HubCache, listing: Listing, partial_sizes: Mapping[str, int] | None = None
) -> None:
    """Check that the disk has space for the missing files. Raises BadModel.

    Files that are unchanged since another commit in the cache are not missing.

    partial_sizes: path -> bytes of an unfinished file that are on the disk.
    """
    folder = disk.snapshot(listing.repo, listing.commit)
    blobs = disk.repository(listing.repo) / "blobs"
    cache = disk.repository(listing.repo).parent

    def is_in_cache(path: str, size: int) -> bool:
        blob = listing.blobs.get(path)
        return stat_size(folder / path) == size or (
            blob is not None and stat_size(blobs / blob) == size
        )

    partial_sizes = partial_sizes or {}
    missing_bytes = sum(
        size - partial_sizes.get(path, 0)
        for path, size in listing.files.items()
        if not is_in_cache(path, size)
    )
    if not missing_bytes:
        return
    try:
        cache.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(cache).free
    except OSError as error:
        raise BadModel(
            f"The folder {cache} cannot be made: {error.strerror}.",
            hint="Set FITSERVE_MODELS_DIR to a folder that the gateway can write.",
        ) from None
    if missing_bytes + MARGIN_BYTES > free_bytes:
        raise BadModel(
            f"The download needs {format_bytes(missing_bytes + MARGIN_BYTES)} (1 GiB of it as a"
            f" margin), and {format_bytes(free_bytes)} are free at {cache}.",
            hint=(
                "Free space there (`fitserve df` lists unused weights), or set FITSERVE_MODELS_DIR"
                " to a folder on a larger disk."
            ),
        )


def matches_digest(path: Path, digest: str | None) -> bool:
    """Whether a file has this digest, SHA-256 or git's; True where neither form is known."""
    digest = digest or (path.readlink().name if path.is_symlink() else "")
    size = path.stat().st_size
    with path.open("rb") as file:
        if len(digest) == len(hashlib.sha256().hexdigest()):
            return hashlib.file_digest(file, "sha256").hexdigest() == digest
        if len(digest) == len(hashlib.sha1(usedforsecurity=False).hexdigest()):
            start = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
            return hashlib.file_digest(file, lambda: start).hexdigest() == digest
    return True


def allow_reading(disk: HubCache, listing: Listing) -> None:
    """Let all users read the files and enter the folders from the repository's downward.

    An engine's container runs as another user. On the host, the cache's own folder keeps other
    users out, or its owner decides.
    """
    repository = disk.repository(listing.repo)
    folder = disk.snapshot(listing.repo, listing.commit)
    folders = {repository, repository / "blobs", folder.parent, folder}
    folders |= {
        parent
        for name in listing.files
        for parent in (folder / name).parents
        if folder in parent.parents
    }
    for path, mode in (
        *((path, 0o755) for path in folders),
        *((folder / name, 0o644) for name in listing.files),
    ):
        # Files of another user of the cache keep the rights that this user gave.
        with suppress(OSError):
            current_mode = stat.S_IMODE(path.stat().st_mode)
            if current_mode & mode != mode:
                path.chmod(current_mode | mode)


def protect(disk: HubCache, listing: Listing) -> None:
    """Name the commit, because `hf cache prune` removes a commit without a name."""
    ref = disk.repository(listing.repo) / "refs" / "fitserve" / listing.commit
    with suppress(OSError):
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(listing.commit)
