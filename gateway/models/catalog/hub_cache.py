"""The cache of the Hugging Face Hub on this machine, which all programs of a user share, and what
we know of the commits in it.

    CACHE/models--ORG--NAME/snapshots/COMMIT/   the files of a commit, links to ../../blobs/
    CACHE/models--ORG--NAME/refs/NAME           what a branch meant when a program last asked
    CACHE/models--ORG--NAME/trees/COMMIT.json   the listing of a commit, as huggingface_hub keeps it
    NOTES/listings/, files/                     listings and small files that were read of a Hub, by commit
    NOTES/whole/ORG--NAME/COMMIT.json           this commit was looked at byte by byte: what an engine needs of it is here

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
_LONGEST_PATH = 1024


class Listing(NamedTuple):
    """A repository at a commit: path -> bytes of every file, and path -> the name of its blob (a
    digest) where a Hub told it."""

    repo: str
    commit: str
    files: dict[str, int]
    blobs: Mapping[str, str] = {}


class _Kept(msgspec.Struct):
    files: dict[str, int]
    blobs: dict[str, str]


class _Whole(msgspec.Struct):
    remote_code: bool
    files: dict[str, int]


class HubCache(NamedTuple):
    """folder: the cache; None: no weights are kept here. notes: a folder of ours, for what is known
    of commits."""

    folder: Path | None
    notes: Path

    def repository(self, repo: str) -> Path:
        assert self.folder is not None  # noqa: S101 - nothing is downloaded without
        return self.folder / f"models--{repo.replace('/', '--')}"

    def snapshot(self, repo: str, commit: str) -> Path:
        return self.repository(repo) / "snapshots" / commit

    def here(self, repo: str, commit: str) -> Path | None:
        """The folder of the commit without links on its way, if anything of it is here."""
        if self.folder is None:
            return None
        with suppress(OSError, RuntimeError):
            return self.snapshot(repo, commit).resolve(strict=True)
        return None

    def named(self, repo: str, revision: str | None) -> str | None:
        """The commit that a branch or tag (None: main) meant when a program last asked for it."""
        if self.folder is None or not stays_inside(revision or "main"):
            return None
        with suppress(OSError, UnicodeDecodeError):
            found = COMMIT.fullmatch(
                (self.repository(repo) / "refs" / (revision or "main")).read_text().strip()
            )
            return found[0] if found else None
        return None

    def listing(self, repo: str, commit: str) -> Listing | None:
        """All files of the commit, as a Hub listed them to us or to another program; None: nobody
        asked."""
        with suppress(OSError, ValueError):
            kept = msgspec.json.decode(
                self._note("listings", repo, commit).read_bytes(), type=_Kept
            )
            return Listing(repo, commit, kept.files, kept.blobs)
        if self.folder is None:
            return None
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            tree: Any = msgspec.json.decode(
                (self.repository(repo) / "trees" / f"{commit}.json").read_bytes()
            )
            files = {str(path): int(one["size"]) for path, one in tree["files"].items()}
            blobs = {
                str(path): str(one.get("lfs_sha256") or one["blob_id"])
                for path, one in tree["files"].items()
            }
            return Listing(repo, commit, files, blobs) if all(map(stays_inside, files)) else None
        return None

    def found(self, repo: str, commit: str) -> Listing | None:
        """The files of the commit that are here, where its listing is not known. Some may be
        missing."""
        folder = self.here(repo, commit)
        if folder is None:
            return None
        files = {
            str(path.relative_to(folder)): path.stat().st_size
            for path in (Path(place, name) for place, _, names in os.walk(folder) for name in names)
            if path.is_file()
        }
        return Listing(repo, commit, files) if files else None

    def keep(self, listing: Listing) -> None:
        """What cannot be written is asked for again."""
        with suppress(OSError):
            put(
                self._note("listings", listing.repo, listing.commit),
                msgspec.json.encode(_Kept(listing.files, dict(listing.blobs))),
            )

    def small_file(self, repo: str, commit: str, name: str) -> Path:
        return self.notes / "files" / _plain(repo) / commit / name

    def is_whole(self, repo: str, commit: str, *, remote_code: bool) -> bool:
        """Whether all that an engine needs of the commit was found right once, and is still here;
        code where it is wanted."""
        try:
            whole = msgspec.json.decode(self._note("whole", repo, commit).read_bytes(), type=_Whole)
            folder = self.snapshot(repo, commit)
            return (whole.remote_code or not remote_code) and all(
                (folder / name).stat().st_size == size for name, size in whole.files.items()
            )
        except (OSError, ValueError):
            return False

    def note_whole(
        self, repo: str, commit: str, files: dict[str, int], *, remote_code: bool
    ) -> None:
        """Raises OSError."""
        put(self._note("whole", repo, commit), msgspec.json.encode(_Whole(remote_code, files)))

    def lock_file(self, repo: str, commit: str) -> Path:
        return self._note("whole", repo, commit).with_suffix(".lock")

    def forget(self, repo: str, commit: str) -> None:
        """The commit was deleted."""
        self._note("whole", repo, commit).unlink(missing_ok=True)

    def _note(self, kind: str, repo: str, commit: str) -> Path:
        return self.notes / kind / _plain(repo) / f"{commit}.json"


def _plain(repo: str) -> str:
    return repo.replace("/", "--")


def put(path: Path, data: bytes) -> None:
    """A file that is whole or not there. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_bytes(data)
    beside.replace(path)


def stays_inside(path: Any) -> bool:
    """Whether a path of a listing is a plain one below the folder into which a repository is
    fetched."""
    try:
        plain = (
            isinstance(path, str)
            and len(path.encode()) <= _LONGEST_PATH
            and "\0" not in path
            and "\\" not in path
        )
    except UnicodeEncodeError:
        return False
    return plain and not any(part in ("", ".", "..") for part in path.split("/"))
