"""The repositories of a Hub's cache, damaged ones too.

huggingface_hub 2.4.0 leaves out a whole repository where one link leads nowhere, a branch names a
commit that is gone, or a file lies between the snapshots. Such a repository is read here.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRepoInfo, CachedRevisionInfo, HFCacheInfo

_MODELS = "models--"

Missing = Mapping[tuple[str, str], tuple[str, ...]]
"""Repository and commit -> names of its files whose links lead nowhere."""


class CacheScan(NamedTuple):
    """The repositories of a cache. `info`: None without a cache."""

    info: HFCacheInfo | None
    missing_files: Missing


def scan_cache(cache: Path) -> CacheScan:
    """The models of a cache, and the files that it lacks. Raises OSError, ValueError."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        info = scan_cache_dir(cache)
    except CacheNotFound:
        return CacheScan(None, {})
    whole_paths = {repo.repo_path for repo in info.repos}
    missing_files: dict[tuple[str, str], tuple[str, ...]] = {}
    damaged_repos = [
        _repository(folder, missing_files)
        for folder in sorted(cache.glob(f"{_MODELS}*"))
        if folder not in whole_paths and (folder / "snapshots").is_dir()
    ]
    damaged_bytes = sum(repo.size_on_disk for repo in damaged_repos)
    joined_info = dataclasses.replace(
        info,
        repos=info.repos | frozenset(damaged_repos),
        size_on_disk=info.size_on_disk + damaged_bytes,
    )
    return CacheScan(joined_info, missing_files)


def _repository(
    folder: Path, missing_files: dict[tuple[str, str], tuple[str, ...]]
) -> CachedRepoInfo:
    """A repository of the cache. Missing files of snapshots are added to `missing_files`."""
    from huggingface_hub import CachedRepoInfo

    name = folder.name.removeprefix(_MODELS).replace("--", "/")
    refs = _refs(folder / "refs")
    revisions = []
    for snapshot in sorted(path for path in (folder / "snapshots").iterdir() if path.is_dir()):
        revision, lost_files = _revision(snapshot, refs.get(snapshot.name, set()))
        revisions.append(revision)
        if lost_files:
            missing_files[name, snapshot.name] = lost_files
    blobs = {file.blob_path: file for revision in revisions for file in revision.files}.values()
    folder_stat = folder.stat()
    return CachedRepoInfo(
        repo_id=name,
        repo_type="model",
        repo_path=folder,
        size_on_disk=sum(file.size_on_disk for file in blobs),
        nb_files=len(blobs),
        revisions=frozenset(revisions),
        last_accessed=max(
            (file.blob_last_accessed for file in blobs), default=folder_stat.st_atime
        ),
        last_modified=max(
            (file.blob_last_modified for file in blobs), default=folder_stat.st_mtime
        ),
    )


def _revision(snapshot: Path, refs: set[str]) -> tuple[CachedRevisionInfo, tuple[str, ...]]:
    """The revision of a snapshot folder, and the files that it lacks."""
    from huggingface_hub import CachedRevisionInfo

    files = []
    lost_files = []
    for path in sorted(snapshot.glob("**/*")):
        if path.is_dir():
            continue
        try:
            files.append(_file(path))
        except FileNotFoundError:
            lost_files.append(path.relative_to(snapshot).as_posix())
    modified = [file.blob_last_modified for file in files]
    sizes = {file.blob_path: file.size_on_disk for file in files}
    revision = CachedRevisionInfo(
        commit_hash=snapshot.name,
        snapshot_path=snapshot,
        size_on_disk=sum(sizes.values()),
        files=frozenset(files),
        refs=frozenset(refs),
        last_modified=max(modified, default=snapshot.stat().st_mtime),
    )
    return revision, tuple(lost_files)


def _file(path: Path) -> CachedFileInfo:
    """The cached file at a path. Raises FileNotFoundError where its link leads nowhere."""
    from huggingface_hub import CachedFileInfo

    # The first link only: blobs may be links into a store that several caches share.
    blob = Path(os.path.normpath(path.parent / path.readlink())) if path.is_symlink() else path
    status = blob.stat()
    return CachedFileInfo(
        file_name=path.name,
        file_path=path,
        blob_path=blob,
        size_on_disk=status.st_size,
        blob_last_accessed=status.st_atime,
        blob_last_modified=status.st_mtime,
    )


def _refs(folder: Path) -> dict[str, set[str]]:
    """Commits with the branches and tags that name them."""
    names: dict[str, set[str]] = {}
    for path in folder.glob("**/*"):
        if path.is_file():
            commit = path.read_text(errors="replace").strip()
            names.setdefault(commit, set()).add(path.relative_to(folder).as_posix())
    return names
