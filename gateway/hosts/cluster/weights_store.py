"""The weights on the disk of a node, for nodes that copy them.

Only commits of the Hub are copied whose digests were checked on their node, and of these only the
files that an engine needs. An unfinished copy stays next to its blob, and the next one continues
it. A file is of use after its digest was compared.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from gateway.errors import AgentRefusal, BadModel, Conflict, HostError
from gateway.hosts.agent.calls import CHUNK_BYTES, CommitCall, MissingFile, WeightsFile
from gateway.models.catalog.commit_files import (
    allow_reading,
    check_disk_space,
    matches_digest,
    protect,
    stat_size,
)
from gateway.models.catalog.folder_reach import check_reach
from gateway.models.catalog.hub_cache import HubCache, Listing, stays_inside

_PARTIAL_SUFFIX = ".fitserve-copy"
_SHA256_DIGITS = 64


class _CheckedFile(NamedTuple):
    """A file as it was when its digest was compared."""

    digest: str
    inode: int
    mtime_ns: int


class WeightsStore:
    """The commits in the Hub's cache of this machine."""

    def __init__(self, disk: HubCache, node: str) -> None:
        """node: the name of this machine. A cache on a network may have copies of several."""
        self._disk = disk
        self._node = node
        self._checked_files: set[_CheckedFile] = set()
        """Files that were compared since the start."""

    def names(self) -> tuple[str, ...]:
        """The commits that are whole, as `org/name@commit`."""
        return tuple(f"{repo}@{commit}" for repo, commit in self._disk.whole_commits())

    def files(self, call: CommitCall) -> tuple[WeightsFile, ...]:
        """The files of a whole commit, with their digests; none: another node cannot copy it."""
        listing = self._disk.listing(call.repo, call.commit)
        digests = listing.blobs if listing is not None else {}
        folder = self._disk.snapshot(call.repo, call.commit)
        try:
            return tuple(
                WeightsFile(name=name, size=size, digest=_digest(folder / name, digests.get(name)))
                for name, size in self._file_sizes(call).items()
            )
        except ValueError:
            # Files without a digest in their listing and in their names.
            return ()

    def _file_sizes(self, call: CommitCall) -> Mapping[str, int]:
        sizes = self._disk.whole_files(call.repo, call.commit, remote_code=call.remote_code) or {}
        if call.remote_code:
            return sizes
        return {name: size for name, size in sizes.items() if not name.endswith(".py")}

    def open_file(self, call: CommitCall, name: str) -> FileIO:
        """Open a file of a whole commit. Raises AgentRefusal for any other file."""
        if name not in self._file_sizes(call):
            raise AgentRefusal(
                f"The machine {self._node} sends no {name} of {call.repo}.",
                hint="Only files of a commit that was checked there are sent.",
            )
        folder = self._disk.snapshot(call.repo, call.commit)
        try:
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise _disk_error("read", folder / name, error) from None
        try:
            check_reach(descriptor, folder, str(folder / name))
            return FileIO(descriptor)
        except BadModel as error:
            os.close(descriptor)
            raise AgentRefusal(error.message, hint=error.hint) from None

    def check(self, call: CommitCall, files: Sequence[WeightsFile]) -> None:
        """Check that the files can be written here.

        Raises HostError where the disk has no space, and AgentRefusal for names that lead outside.
        """
        self._check_names(files)
        offsets = {file.name: self._offset(call, file) for file in files}
        try:
            check_disk_space(self._disk, _make_listing(call, files), offsets)
        except BadModel as error:
            raise HostError(error.message, hint=error.hint) from None

    def missing_file(self, call: CommitCall, file: WeightsFile) -> MissingFile | None:
        """The file with the bytes of it that are here; None: it has the digest, and is a part of
        the commit now."""
        if self._adopt(call, file):
            return None
        return MissingFile(file=file, offset=self._offset(call, file))

    def _check_names(self, files: Sequence[WeightsFile]) -> None:
        if not all(stays_inside(file.name) for file in files):
            raise AgentRefusal(
                f"The machine {self._node} refuses: a file of the commit has a path outside of it.",
                hint="Run the same fitserve on all machines.",
            )

    def _adopt(self, call: CommitCall, file: WeightsFile) -> bool:
        """Make a blob or a file of the folder a part of the commit. Returns whether it is one."""
        path = self._disk.snapshot(call.repo, call.commit) / file.name
        blob = self._blob_path(call, file)
        path_of_bytes = path if stat_size(path) == file.size else blob
        if stat_size(path_of_bytes) != file.size:
            return False
        with suppress(OSError):
            checked_file = _checked_file(path_of_bytes, file.digest)
            if checked_file in self._checked_files or matches_digest(path_of_bytes, file.digest):
                self._checked_files.add(checked_file)
                if path_of_bytes is blob:
                    self._link(path, blob)
                return True
            path_of_bytes.unlink()
        return False

    def _link(self, path: Path, blob: Path) -> None:
        """Let the snapshot's path lead to the blob. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{self._node}{_PARTIAL_SUFFIX}")
        draft.unlink(missing_ok=True)
        draft.symlink_to(os.path.relpath(blob, path.parent))
        draft.replace(path)

    def _blob_path(self, call: CommitCall, file: WeightsFile) -> Path:
        return self._disk.repository(call.repo) / "blobs" / file.digest

    def _unfinished_path(self, call: CommitCall, file: WeightsFile) -> Path:
        blob = self._blob_path(call, file)
        return blob.with_name(f"{blob.name}.{self._node}{_PARTIAL_SUFFIX}")

    def _offset(self, call: CommitCall, file: WeightsFile) -> int:
        path = self._unfinished_path(call, file)
        if (size := stat_size(path) or 0) <= file.size:
            return size
        path.unlink(missing_ok=True)
        return 0

    def writer(self, call: CommitCall, file: WeightsFile, offset: int) -> CopyWriter:
        """The writer of a file from `offset` on. Raises HostError."""
        self._check_names([file])
        path = self._unfinished_path(call, file)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return CopyWriter(path, _open_exclusively(path, offset), file, offset)
        except BlockingIOError:
            raise Conflict(
                f"{file.name} of {call.repo} is being copied to {self._node} already.",
                hint="Wait for the end of the other copy.",
            ) from None
        except OSError as error:
            raise _disk_error("written", path, error) from None

    def accept(self, call: CommitCall, copy: CopyWriter) -> None:
        """Make a complete file a part of the commit. Raises HostError, and removes a wrong one."""
        blob = self._blob_path(call, copy.file)
        try:
            copy.finish(blob)
            self._checked_files.add(_checked_file(blob, copy.file.digest))
            self._link(self._disk.snapshot(call.repo, call.commit) / copy.file.name, blob)
        except OSError as error:
            raise _disk_error("written", blob, error) from None

    def record_whole(self, call: CommitCall, files: Sequence[WeightsFile]) -> None:
        """Note that all of these files are here and were compared. Raises HostError."""
        listing = _make_listing(call, files)
        allow_reading(self._disk, listing)
        protect(self._disk, listing)
        try:
            self._disk.record_whole(
                call.repo, call.commit, listing.files, remote_code=call.remote_code
            )
        except OSError as error:
            raise _disk_error("written", self._disk.notes, error) from None


class CopyWriter:
    """A file that is being received. The memory that it takes is that of a chunk."""

    def __init__(self, path: Path, descriptor: int, file: WeightsFile, offset: int) -> None:
        self.file = file
        self.size = offset
        self._path = path
        self._descriptor = descriptor
        self._is_open = True
        self._lock = threading.Lock()
        """Held while a thread uses the descriptor, which has another file after `close`."""
        self._hash = (
            hashlib.sha256()
            if len(file.digest) == _SHA256_DIGITS
            else hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
        )

    def read_beginning(self) -> Iterator[int]:
        """Read the bytes of a former copy, by chunks with these sizes. Raises HostError."""
        position = 0
        while position < self.size:
            most_bytes = min(CHUNK_BYTES, self.size - position)
            try:
                with self._open_descriptor() as descriptor:
                    chunk = os.pread(descriptor, most_bytes, position)
            except OSError as error:
                raise _disk_error("read", self._path, error) from None
            if not chunk:
                raise HostError(
                    f"The unfinished copy of {self.file.name} has become shorter.",
                    hint="The next start copies it from its beginning.",
                )
            self._hash.update(chunk)
            position += len(chunk)
            yield len(chunk)

    def write(self, chunk: bytes) -> None:
        """Append a chunk. Raises HostError where the disk is full, or the file is too long."""
        if self.size + len(chunk) > self.file.size:
            raise HostError(
                f"The other machine sends more than the {self.file.size} bytes of"
                f" {self.file.name}.",
                hint="Download the model there once more: `fitserve pull`.",
            )
        self._hash.update(chunk)
        unwritten_bytes = memoryview(chunk)
        while unwritten_bytes:
            try:
                with self._open_descriptor() as descriptor:
                    written_bytes = os.pwrite(descriptor, unwritten_bytes, self.size)
            except OSError as error:
                raise _disk_error("written", self._path, error) from None
            self.size += written_bytes
            unwritten_bytes = unwritten_bytes[written_bytes:]

    def finish(self, blob: Path) -> None:
        """Give the file its name. Raises OSError, and HostError for a file that is not whole or
        has another digest."""
        if self.size < self.file.size:
            raise HostError(
                f"The copy of {self.file.name} broke off after {self.size} of {self.file.size}"
                " bytes.",
                hint="The next start continues it.",
            )
        if self._hash.hexdigest() != self.file.digest:
            self._path.unlink(missing_ok=True)
            raise HostError(
                f"The copy of {self.file.name} does not match its digest: its bytes have changed"
                " on the disk of the other machine, or on the way.",
                hint="The copy was removed. `fitserve pull` on the other machine checks its files.",
            )
        with self._open_descriptor() as descriptor:
            os.fsync(descriptor)
        self._path.replace(blob)

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            os.close(self._descriptor)

    @contextmanager
    def _open_descriptor(self) -> Iterator[int]:
        """The descriptor, which stays open meanwhile. Raises OSError after `close`."""
        with self._lock:
            if not self._is_open:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            yield self._descriptor


def _open_exclusively(path: Path, offset: int) -> int:
    """The descriptor of a file, cut at the offset. Raises OSError: BlockingIOError while another
    copy writes to it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another copy may have finished the file and renamed it before the lock.
            if _is_file_of(path, descriptor):
                os.ftruncate(descriptor, offset)
                return descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_file_of(path: Path, descriptor: int) -> bool:
    """Whether the path leads to the open file. Raises OSError."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def read_chunk(file: FileIO, position: int) -> bytes:
    """The next bytes; none at the end of the file. Raises HostError."""
    try:
        return os.pread(file.fileno(), CHUNK_BYTES, position)
    except OSError as error:
        raise HostError(
            f"A file of the model cannot be read: {error.strerror}.",
            hint="Check the disk of the machine that has it.",
        ) from None


def _digest(path: Path, listed_digest: str | None) -> str:
    """The digest that the Hub listed, or the name of the blob. Raises ValueError without both."""
    if listed_digest:
        return listed_digest
    try:
        return path.readlink().name
    except OSError as error:
        raise ValueError from error


def _checked_file(path: Path, digest: str) -> _CheckedFile:
    """The file's present state. Raises OSError."""
    status = path.stat()
    return _CheckedFile(digest, status.st_ino, status.st_mtime_ns)


def _make_listing(call: CommitCall, files: Sequence[WeightsFile]) -> Listing:
    return Listing(
        call.repo,
        call.commit,
        {file.name: file.size for file in files},
        {file.name: file.digest for file in files},
    )


def _disk_error(verb: str, path: Path, error: OSError) -> HostError:
    return HostError(
        f"{path} cannot be {verb}: {error.strerror}.",
        hint="Free disk space, and let the user of fitserve read and write the cache of models.",
    )
