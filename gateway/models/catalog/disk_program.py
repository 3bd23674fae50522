"""The program that reads disk usage and removes weights, with huggingface_hub.

Input: a `DiskJob` as JSON on stdin. Output as JSON on stdout: a `Disk`, or the result of
`remove_weights` if the job names revisions.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from gateway.models.catalog.cache_scan import scan_cache
from gateway.models.catalog.disk import DiskJob
from gateway.models.catalog.hub_cache import HubCache

_GATEWAY_REFS = "fitserve/"


def main() -> None:
    job = DiskJob(*json.load(sys.stdin.buffer))
    json.dump(remove_weights(job) if job.remove else disk_usage(job), sys.stdout)


def disk_usage(job: DiskJob) -> dict[str, Any]:
    """Sizes in bytes of the cache, of each revision in it and of each engine."""
    cache = Path(job.cache)
    existing = next(parent for parent in (cache, *cache.parents) if parent.is_dir())
    info, missing_files = scan_cache(cache)
    revisions = [
        {
            "repo": repo.repo_id,
            "commit": revision.commit_hash,
            "bytes": revision.size_on_disk,
            "last_used": max(
                (file.blob_last_accessed for file in revision.files), default=revision.last_modified
            ),
            "names": sorted(ref for ref in revision.refs if not ref.startswith(_GATEWAY_REFS)),
            "is_from_fitserve": any(ref.startswith(_GATEWAY_REFS) for ref in revision.refs),
            "missing": missing_files.get((repo.repo_id, revision.commit_hash), ()),
        }
        for repo in (info.repos if info is not None else ())
        if repo.repo_type == "model"
        for revision in repo.revisions
    ]
    return {
        "cache": str(cache),
        "cache_bytes": info.size_on_disk if info is not None else 0,
        "unfinished_bytes": info.incomplete_size_on_disk if info is not None else 0,
        "free_bytes": shutil.disk_usage(existing).free,
        "revisions": revisions,
        "engines": [
            _engine_row(Path(job.data), folder)
            for folder in sorted((Path(job.data) / "engines").glob("[!.]*"))
        ],
    }


def remove_weights(job: DiskJob) -> dict[str, Any]:
    """Remove the revisions of the job; blobs that other revisions use stay."""
    freed_bytes = 0
    revisions = []
    disk = HubCache(Path(job.cache), Path(job.notes))
    for repo, commit in job.remove:
        info, _ = scan_cache(Path(job.cache))
        if info is None:
            continue
        # The library names revisions only by commit, and copies of a repository share commits.
        copies = frozenset(
            repository
            for repository in info.repos
            if (repository.repo_type, repository.repo_id) == ("model", repo)
        )
        if not any(
            revision.commit_hash == commit
            for repository in copies
            for revision in repository.revisions
        ):
            continue
        strategy = dataclasses.replace(info, repos=copies).delete_revisions(commit)
        disk.forget(repo, commit)
        strategy.execute()
        freed_bytes += strategy.expected_freed_size
        revisions.append([repo, commit])
    return {"freed_bytes": freed_bytes, "removed": revisions}


def _engine_row(data: Path, folder: Path) -> dict[str, Any]:
    caches = data / "caches" / folder.name
    used_bytes = [
        path.stat().st_mtime for path in (folder, *(caches.iterdir() if caches.is_dir() else ()))
    ]
    return {
        "folder": str(folder),
        "name": folder.name,
        "bytes": _bytes(folder),
        "caches_bytes": _bytes(caches),
        "last_used": max(used_bytes),
    }


def _bytes(folder: Path) -> int:
    """Bytes on the disk, each file counted once, links not followed."""
    sizes: dict[tuple[int, int], int] = {}
    folders = [os.fspath(folder)]
    while folders:
        # An engine has 50,000 files: a path object for each costs six times the reading.
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    continue
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    sizes[(status.st_dev, status.st_ino)] = status.st_blocks * 512
    return sum(sizes.values())


if __name__ == "__main__":
    main()
