"""The cache of the Hugging Face Hub on this machine, with the gateway's notes on its commits.

    CACHE/models--ORG--NAME/snapshots/COMMIT/   the files of a commit, links to ../../blobs/
    CACHE/models--ORG--NAME/refs/NAME           the commit of a branch at its last resolution
    CACHE/models--ORG--NAME/trees/COMMIT.json   the listing of a commit, kept by huggingface_hub
    NOTES/listings/, files/                     listings and small files of a Hub, by commit
    NOTES/whole/ORG--NAME/COMMIT.json           all digests of this commit were checked

Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_PATH_CHARACTERS = 1024


class Listing(NamedTuple):
    """A repository at a commit.

    files: path -> size in bytes.
    blobs: path -> name of the blob (a digest), where the Hub listed it.
    """

    repo: str
    commit: str
    files: dict[str, int]
    blobs: Mapping[str, str] = {}


class _ListingNote(msgspec.Struct):
    files: dict[str, int]
    blobs: dict[str, str]


class _WholeNote(msgspec.Struct):
    remote_code: bool
    files: dict[str, int]


class HubCache(NamedTuple):
    """The cache and its notes.

    folder: the cache; None: no weights are kept here.
    notes: the gateway's folder of notes.
    """

    folder: Path | None
    notes: Path

    def repository(self, repo: str) -> Path:
        assert self.folder is not None  # noqa: S101 - no download happens without a cache
        return self.folder / f"models--{repo.replace('/', '--')}"

    def snapshot(self, repo: str, commit: str) -> Path:
        return self.repository(repo) / "snapshots" / commit

    def folder_of(self, repo: str, commit: str) -> Path | None:
        """The folder of the commit, links resolved; None: no file of the commit is on the disk."""
        if self.folder is None:
            return None
        with suppress(OSError, RuntimeError):
            return self.snapshot(repo, commit).resolve(strict=True)
        return None

    def newest_folders(self) -> list[tuple[str, Path]]:
        """Repositories with a commit on the disk and its folder: main's, else the newest."""
        folders = []
        repositories = sorted(self.folder.glob("models--*--*")) if self.folder is not None else []
        for repository in repositories:
            repo = repository.name.removeprefix("models--").replace("--", "/", 1)
            commit = self.commit_of(repo, None)
            folder = self.folder_of(repo, commit) if commit is not None else None
            if folder is None:
                with suppress(OSError):
                    snapshots = list((repository / "snapshots").iterdir())
                    folder = max(snapshots, key=lambda path: path.stat().st_mtime, default=None)
            if folder is not None:
                folders.append((repo, folder))
        return folders

    def commit_of(self, repo: str, revision: str | None) -> str | None:
        """The commit of a branch or tag (None: main) when a program last resolved it."""
        if self.folder is None or not stays_inside(revision or "main"):
            return None
        with suppress(OSError, UnicodeDecodeError):
            match = COMMIT.fullmatch(
                (self.repository(repo) / "refs" / (revision or "main")).read_text().strip()
            )
            return match[0] if match else None
        return None

    def listing(self, repo: str, commit: str) -> Listing | None:
        """All files of the commit, as a Hub listed them to a program of this machine.

        None: no program has requested the listing.
        """
        with suppress(OSError, ValueError):
            note = msgspec.json.decode(
                self._commit_note("listings", repo, commit).read_bytes(), type=_ListingNote
            )
            return Listing(repo, commit, note.files, note.blobs)
        if self.folder is None:
            return None
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            tree: Any = msgspec.json.decode(
                (self.repository(repo) / "trees" / f"{commit}.json").read_bytes()
            )
            files = {str(path): int(row["size"]) for path, row in tree["files"].items()}
            blobs = {
                str(path): str(row.get("lfs_sha256") or row["blob_id"])
                for path, row in tree["files"].items()
            }
            return Listing(repo, commit, files, blobs) if all(map(stays_inside, files)) else None
        return None

    def local_files(self, repo: str, commit: str) -> Listing | None:
        """The files of the commit on the disk, for an unknown listing. Some may be missing."""
        folder = self.folder_of(repo, commit)
        if folder is None:
            return None
        files = {
            str(path.relative_to(folder)): path.stat().st_size
            for path in (
                Path(folder_path, name)
                for folder_path, _, names in os.walk(folder)
                for name in names
            )
            if path.is_file()
        }
        return Listing(repo, commit, files) if files else None

    def store(self, listing: Listing) -> None:
        """Keep a listing. A failed write costs another request later."""
        with suppress(OSError):
            write_atomically(
                self._commit_note("listings", listing.repo, listing.commit),
                msgspec.json.encode(_ListingNote(listing.files, dict(listing.blobs))),
            )

    def small_file(self, repo: str, commit: str, name: str) -> Path:
        return self.notes / "files" / _folder_name(repo) / commit / name

    def is_whole(self, repo: str, commit: str, *, remote_code: bool) -> bool:
        """Whether the files that an engine needs were checked once and are still on the disk.

        remote_code: code is one of these files.
        """
        return self.whole_files(repo, commit, remote_code=remote_code) is not None

    def whole_files(self, repo: str, commit: str, *, remote_code: bool) -> dict[str, int] | None:
        """The sizes of the files that `is_whole` means, by path; None: they are not on the disk."""
        try:
            note = msgspec.json.decode(
                self._commit_note("whole", repo, commit).read_bytes(), type=_WholeNote
            )
            folder = self.snapshot(repo, commit)
            is_present = (note.remote_code or not remote_code) and all(
                (folder / name).stat().st_size == size for name, size in note.files.items()
            )
        except (OSError, ValueError):
            return None
        return note.files if is_present else None

    def whole_commits(self) -> list[tuple[str, str]]:
        """Repository and commit of all files that were checked once and are on the disk."""
        if self.folder is None:
            return []
        notes = sorted((self.notes / "whole").glob("*--*/*.json"))
        commits = [(path.parent.name.replace("--", "/", 1), path.stem) for path in notes]
        return [row for row in commits if self.is_whole(*row, remote_code=False)]

    def record_whole(
        self, repo: str, commit: str, files: dict[str, int], *, remote_code: bool
    ) -> None:
        """Note that the files of the commit are complete. Raises OSError."""
        note = _WholeNote(remote_code, files)
        write_atomically(self._commit_note("whole", repo, commit), msgspec.json.encode(note))

    def lock_file(self, repo: str, commit: str) -> Path:
        return self._commit_note("whole", repo, commit).with_suffix(".lock")

    def forget(self, repo: str, commit: str) -> None:
        """Remove the note on a deleted commit."""
        self._commit_note("whole", repo, commit).unlink(missing_ok=True)

    def _commit_note(self, kind: str, repo: str, commit: str) -> Path:
        return self.notes / kind / _folder_name(repo) / f"{commit}.json"


def _folder_name(repo: str) -> str:
    return repo.replace("/", "--")


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)


def stays_inside(path: Any) -> bool:
    """Whether a path of a listing stays below the repository's folder."""
    try:
        is_plain = (
            isinstance(path, str)
            and len(path.encode()) <= _MAX_PATH_CHARACTERS
            and "\0" not in path
            and "\\" not in path
        )
    except UnicodeEncodeError:
        return False
    return is_plain and not any(part in ("", ".", "..") for part in path.split("/"))
