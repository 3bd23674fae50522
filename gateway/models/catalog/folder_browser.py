"""Folders of this machine as people walk through them, below roots that an operator named."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from gateway.errors import BadRequest, Busy, NotFound, NotReady
from gateway.file_reading import PATIENCE_S, FileReader
from gateway.models.catalog.folder_reach import is_readable

# Entries of a folder that are read, and folders that are listed.
_MAX_ENTRIES = 5000
_MAX_ROWS = 500
# Folders that are read concurrently. A hanging mount keeps its place until it answers.
_MAX_CALLS = 4
# A hanging root delays the list of all of them by so much.
_ROOT_PATIENCE_S = 2.0
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class FolderRow(NamedTuple):
    """A folder. is_model: it has a config.json."""

    name: str
    path: str
    is_model: bool


class FolderList(NamedTuple):
    """The folders in a folder, by name.

    path: the path of the folder; "": the folders are the roots.
    parent: the path of the parent folder; "": the roots.
    is_cut: there are more.
    """

    path: str
    parent: str
    folders: tuple[FolderRow, ...]
    is_cut: bool


def read_root(root: Path) -> FolderRow | None:
    """The row of a root; None: it is not a folder, or may not be read."""
    return FolderRow(str(root), str(root), _is_model(root)) if os.path.isdir(root) else None  # noqa: PTH112 - no error


def list_folder(path: str, roots: Sequence[Path]) -> FolderList:
    """The folders in a folder at or below a root, without hidden ones and links.

    Each part of the path is opened in the one before, so no link leads out of the root, also one
    that is made meanwhile. Raises BadRequest, NotFound, OSError.
    """
    folder = Path(path)
    outer_roots = [root for root in roots if folder.is_relative_to(root)]
    root = max(outer_roots, key=lambda root: len(root.parts), default=None)
    if root is None or ".." in folder.parts or "\0" in path:
        root_words = ", ".join(map(str, roots)) or "none"
        raise BadRequest(
            f"{path[:200]!r} is not below a folder that may be browsed: {root_words}.",
            hint="FITSERVE_MODEL_FOLDERS names these folders.",
            param="path",
        )
    descriptor = _open_below(root, folder.relative_to(root).parts, path)
    try:
        rows, is_cut = _rows(descriptor, folder)
    finally:
        os.close(descriptor)
    parent = "" if folder == root else str(folder.parent)
    return FolderList(str(folder), parent, rows, is_cut)


def _open_below(root: Path, parts: Sequence[str], path: str) -> int:
    """The descriptor of a folder. Raises NotFound for a link, and for another file."""
    descriptor = -1
    try:
        descriptor = os.open(root, _FOLDER_FLAGS)
        for part in parts:
            deeper = os.open(part, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = deeper
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            raise NotFound(
                f"There is no folder {path[:200]}.", hint="Links are not followed.", param="path"
            ) from None
        raise
    return descriptor


def _rows(descriptor: int, folder: Path) -> tuple[tuple[FolderRow, ...], bool]:
    """The folders in an open folder, and whether there are more."""
    with os.scandir(descriptor) as entries:
        names = [
            entry.name
            for entry in islice(entries, _MAX_ENTRIES)
            if not entry.name.startswith(".")
            and is_readable(entry.name)
            and entry.is_dir(follow_symlinks=False)
        ]
        has_more = next(entries, None) is not None
    rows = (
        FolderRow(name, str(folder / name), _is_model(Path(name), descriptor))
        for name in sorted(names)[:_MAX_ROWS]
    )
    return tuple(rows), has_more or len(names) > _MAX_ROWS


def _is_model(folder: Path, descriptor: int | None = None) -> bool:
    try:
        os.stat(folder / "config.json", dir_fd=descriptor, follow_symlinks=False)
    except OSError:
        return False
    return True


class FolderBrowser:
    """Lists of folders, read outside the event loop."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = tuple(roots)
        self._root_readers = [
            FileReader(partial(read_root, root), _ROOT_PATIENCE_S) for root in self._roots
        ]
        self._readers: dict[str, FileReader[FolderList]] = {}

    async def folders(self, path: str) -> FolderList:
        """The folders in a folder; "": the roots. Raises BadRequest, NotFound, NotReady, Busy."""
        if not path:
            return await self._list_roots()
        self._readers = {name: reader for name, reader in self._readers.items() if reader.is_busy}
        reader = self._readers.get(path)
        if reader is None:
            if len(self._readers) >= _MAX_CALLS:
                raise Busy(
                    f"{_MAX_CALLS} folders are read already.",
                    hint="Try again in a few seconds.",
                    retry_after_s=5,
                )
            reader = FileReader(partial(list_folder, path, self._roots), PATIENCE_S)
            self._readers[path] = reader
        try:
            return await reader.result()
        except OSError as error:
            raise NotReady(
                f"The folder {path[:200]} cannot be read: {error.strerror or error}.",
                hint="Its owner or its file system may refuse.",
            ) from None

    async def _list_roots(self) -> FolderList:
        """The roots that are there. A root whose file system hangs is left out."""
        answers = await asyncio.gather(
            *(reader.result() for reader in self._root_readers), return_exceptions=True
        )
        rows = tuple(answer for answer in answers if isinstance(answer, FolderRow))
        return FolderList("", "", rows, is_cut=False)
