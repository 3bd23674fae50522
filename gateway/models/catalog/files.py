"""The files of a model, in a folder of this machine or in a Hugging Face repository."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

from gateway.errors import BadModel
from gateway.models.catalog.folder_reach import check_reach
from gateway.models.catalog.hub import MAX_FILES, Hub
from gateway.models.catalog.hub_cache import Listing
from gateway.models.catalog.safetensors import read_header
from gateway.models.tensor import Tensor


class Header(NamedTuple):
    """One safetensors file: its size and contents."""

    size: int
    tensors: dict[str, Tensor]


class Files(Protocol):
    """The files of a model. `names` are the files and folders at its root."""

    names: frozenset[str]

    def location(self, name: str) -> str: ...

    def read(self, name: str, limit: int) -> bytes: ...

    def headers(self, names: Sequence[str]) -> Iterator[Header]: ...


def printable(text: str) -> str:
    """The text as Unicode: a file name need not be Unicode, a message must be."""
    return text.encode("utf-8", "backslashreplace").decode()


class Folder:
    """Files in a folder of this machine, each opened once: the checked file is the file read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.names = frozenset(entry.name for entry in islice(path.iterdir(), MAX_FILES + 1))
        except OSError as error:
            raise BadModel(
                f"{path} cannot be read: {error.strerror}.", hint="Let the gateway's user read it."
            ) from None
        if len(self.names) > MAX_FILES:
            raise BadModel(
                f"{path} holds more than {MAX_FILES} files, so it is not the folder of a model.",
                hint="Give the folder of one model.",
            )

    def location(self, name: str) -> str:
        return printable(f"{self.path}/{name}")

    def read(self, name: str, limit: int) -> bytes:
        with self._open_file(name) as (descriptor, size):
            if size > limit:
                raise _size_error(self.location(name), size, limit)
            return os.pread(descriptor, size, 0)

    def headers(self, names: Sequence[str]) -> Iterator[Header]:
        return map(self.header, names)

    def header(self, name: str) -> Header:
        with self._open_file(name) as (descriptor, size):

            def read(offset: int, length: int) -> bytes:
                return os.pread(descriptor, length, offset)

            return Header(size, read_header(self.location(name), size, read))

    @contextmanager
    def _open_file(self, name: str) -> Iterator[tuple[int, int]]:
        location = self.location(name)
        try:
            # A named pipe would block without O_NONBLOCK.
            descriptor = os.open(self.path / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise BadModel(f"{location} is not a file.", hint="Download or copy it again.")
                check_reach(descriptor, self.path, location)
                yield descriptor, status.st_size
            finally:
                os.close(descriptor)
        except OSError as error:
            raise BadModel(
                f"{location} cannot be read: {error.strerror}.",
                hint="Let the gateway's user read it, or copy it again.",
            ) from None


class Repository:
    """Files of a Hugging Face repository at a commit: from the disk if downloaded, else the Hub."""

    def __init__(self, hub: Hub, listing: Listing) -> None:
        self.hub = hub
        self.listing = listing
        folder = hub.disk.folder_of(listing.repo, listing.commit)
        self._folder = Folder(folder) if folder is not None else None
        self.names = frozenset(path.partition("/")[0] for path in listing.files)

    def location(self, name: str) -> str:
        return printable(f"{self.listing.repo}/{name}")

    def read(self, name: str, limit: int) -> bytes:
        size = self.listing.files.get(name, 0)
        if size > limit:
            raise _size_error(self.location(name), size, limit)
        if (folder := self._downloaded_folder(name)) is not None:
            return folder.read(name, limit)
        return self.hub.fetch(self.listing, name)

    def headers(self, names: Sequence[str]) -> Iterator[Header]:
        from concurrent.futures import ThreadPoolExecutor  # a folder needs none

        with ThreadPoolExecutor(8) as pool:
            # A consumer that stops early also ends the remaining reads.
            yield from pool.map(self._header, names)

    def _downloaded_folder(self, name: str) -> Folder | None:
        """The folder that has the complete file; None: the file is not downloaded."""
        if self._folder is not None:
            with suppress(OSError):
                if (self._folder.path / name).stat().st_size == self.listing.files.get(name):
                    return self._folder
        return None

    def _header(self, name: str) -> Header:
        if (folder := self._downloaded_folder(name)) is not None:
            return folder.header(name)

        def read(offset: int, length: int) -> bytes:
            return self.hub.part(self.listing, name, offset, length) if length else b""

        size = self.listing.files.get(name, 0)
        return Header(size, read_header(self.location(name), size, read))


def _size_error(location: str, size: int, limit: int) -> BadModel:
    return BadModel(
        f"{location} has {size} bytes, over the limit of {limit}.",
        hint="A file of this name is never so large; download or copy it again.",
    )
