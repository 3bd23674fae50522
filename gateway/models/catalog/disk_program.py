"""The program that looks at what is on the disk, and removes weights: huggingface_hub counts and
deletes, in a process that ends.

It gets a `DiskJob` on stdin and writes a `Disk`, or with revisions to remove a `Removed`, as JSON
to stdout.
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

from gateway.models.catalog.disk import DiskJob
from gateway.models.catalog.hub_cache import HubCache

_OURS = "fitserve/"


def main() -> None:
    job = DiskJob(*json.load(sys.stdin.buffer))
    os.nice(10)
    json.dump(removed(job) if job.remove else looked(job), sys.stdout)


def looked(job: DiskJob) -> dict[str, Any]:
    cache = Path(job.cache)
    existing = next(parent for parent in (cache, *cache.parents) if parent.is_dir())
    info = _scan(cache)
    revisions = [
        {
            "repo": repo.repo_id,
            "commit": revision.commit_hash,
            "bytes": revision.size_on_disk,
            "last_used": max(
                (file.blob_last_accessed for file in revision.files), default=revision.last_modified
            ),
            "names": sorted(ref for ref in revision.refs if not ref.startswith(_OURS)),
            "ours": any(ref.startswith(_OURS) for ref in revision.refs),
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
            _engine(Path(job.data), folder)
            for folder in sorted((Path(job.data) / "engines").glob("[!.]*"))
        ],
    }


def removed(job: DiskJob) -> dict[str, Any]:
    """Nothing but these revisions: a blob that another one has stays."""
    freed, gone, disk = 0, [], HubCache(Path(job.cache), Path(job.notes))
    for repo, commit in job.remove:
        info = _scan(Path(job.cache))
        # Revisions are named by their commits alone, and copies of a repository have the same.
        of_it = (
            frozenset(one for one in info.repos if (one.repo_type, one.repo_id) == ("model", repo))
            if info is not None
            else ()
        )
        if info is None or not any(
            revision.commit_hash == commit for one in of_it for revision in one.revisions
        ):
            continue
        strategy = dataclasses.replace(info, repos=of_it).delete_revisions(commit)
        disk.forget(repo, commit)
        strategy.execute()
        freed += strategy.expected_freed_size
        gone.append([repo, commit])
    return {"freed_bytes": freed, "removed": gone}


def _scan(cache: Path) -> Any:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return scan_cache_dir(cache)
    except CacheNotFound:
        return None


def _engine(data: Path, folder: Path) -> dict[str, Any]:
    caches = data / "caches" / folder.name
    used = [
        path.stat().st_mtime for path in (folder, *(caches.iterdir() if caches.is_dir() else ()))
    ]
    return {
        "folder": str(folder),
        "name": folder.name,
        "bytes": _bytes(folder),
        "caches_bytes": _bytes(caches),
        "last_used": max(used),
    }


def _bytes(folder: Path) -> int:
    """On the disk, each file once, links not followed."""
    seen: dict[tuple[int, int], int] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                found = (Path(place) / name).lstat()
                seen[(found.st_dev, found.st_ino)] = found.st_blocks * 512
    return sum(seen.values())


if __name__ == "__main__":
    main()
