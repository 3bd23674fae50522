"""The files of a model, in a folder of this machine or in a Hugging Face repository, behind one
small contract."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

from gateway.errors import BadModel
from gateway.models.catalog.hub import MOST_FILES, Hub
from gateway.models.catalog.hub_cache import Listing
from gateway.models.catalog.model_folder import check_opened
from gateway.models.catalog.safetensors import read_header
from gateway.models.spec import Tensor


class Header(NamedTuple):
    """One safetensors file: its size and what it holds."""

    size: int
    tensors: dict[str, Tensor]


class Files(Protocol):
    """The files of a model, wherever they are. `names` are those at its root, folders included."""

    names: frozenset[str]

    def where(self, name: str) -> str: ...

    def read(self, name: str, limit: int) -> bytes: ...

    def headers(self, names: Sequence[str]) -> Iterator[Header]: ...


def printable(text: str) -> str:
    """File names need not be Unicode; messages and values must be."""
    return text.encode("utf-8", "backslashreplace").decode()


class Folder:
    """Files in a folder of this machine. Each is opened once, so the file that is checked is the
    file that is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.names = frozenset(entry.name for entry in islice(path.iterdir(), MOST_FILES + 1))
        except OSError as error:
            raise BadModel(
                f"{path} cannot be read: {error.strerror}.", hint="Let the gateway's user read it."
            ) from None
        if len(self.names) > MOST_FILES:
            raise BadModel(
                f"{path} holds more than {MOST_FILES} files, so it is no model's folder.",
                hint="Give the folder of one model.",
            )

    def where(self, name: str) -> str:
        return printable(f"{self.path}/{name}")

    def read(self, name: str, limit: int) -> bytes:
        with self._opened(name) as (descriptor, size):
            if size > limit:
                raise _too_large(self.where(name), size, limit)
            return os.pread(descriptor, size, 0)

    def headers(self, names: Sequence[str]) -> Iterator[Header]:
        return map(self.header, names)

    def header(self, name: str) -> Header:
        with self._opened(name) as (descriptor, size):

            def read(offset: int, length: int) -> bytes:
                return os.pread(descriptor, length, offset)

            return Header(size, read_header(self.where(name), size, read))

    @contextmanager
    def _opened(self, name: str) -> Iterator[tuple[int, int]]:
        where = self.where(name)
        try:
            # Without O_NONBLOCK a named pipe would be waited for.
            descriptor = os.open(self.path / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise BadModel(f"{where} is not a file.", hint="Download or copy it again.")
                check_opened(descriptor, self.path, where)
                yield descriptor, status.st_size
            finally:
                os.close(descriptor)
        except OSError as error:
            raise BadModel(
                f"{where} cannot be read: {error.strerror}.",
                hint="Let the gateway's user read it, or copy it again.",
            ) from None


class Repository:
    """Files of a Hugging Face repository at a commit: those that were downloaded are read from the
    disk, others from the Hub."""

    def __init__(self, hub: Hub, listing: Listing) -> None:
        self.hub = hub
        self.listing = listing
        folder = hub.disk.here(listing.repo, listing.commit)
        self._folder = Folder(folder) if folder is not None else None
        self.names = frozenset(path.partition("/")[0] for path in listing.files)

    def where(self, name: str) -> str:
        return printable(f"{self.listing.repo}/{name}")

    def read(self, name: str, limit: int) -> bytes:
        size = self.listing.files.get(name, 0)
        if size > limit:
            raise _too_large(self.where(name), size, limit)
        if (folder := self._here(name)) is not None:
            return folder.read(name, limit)
        return self.hub.fetch(self.listing, name)

    def headers(self, names: Sequence[str]) -> Iterator[Header]:
        from concurrent.futures import ThreadPoolExecutor  # a folder needs none

        with ThreadPoolExecutor(8) as pool:
            # Whoever looks at no more of them ends the rest of the reading too.
            yield from pool.map(self._header, names)

    def _here(self, name: str) -> Folder | None:
        """The folder that has the whole file."""
        if self._folder is not None:
            with suppress(OSError):
                if (self._folder.path / name).stat().st_size == self.listing.files.get(name):
                    return self._folder
        return None

    def _header(self, name: str) -> Header:
        if (folder := self._here(name)) is not None:
            return folder.header(name)

        def read(offset: int, length: int) -> bytes:
            return self.hub.part(self.listing, name, offset, length) if length else b""

        size = self.listing.files.get(name, 0)
        return Header(size, read_header(self.where(name), size, read))


def _too_large(where: str, size: int, limit: int) -> BadModel:
    return BadModel(
        f"{where} has {size} bytes, over the limit of {limit}.",
        hint="It cannot be what its name says; copy it again.",
    )
