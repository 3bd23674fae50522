"""Files and batches of all keys in DATA_DIR/batches, within quotas.

    files/ID             bytes of a file, or the growing results of a batch
    files/ID.json        record of a file, written after its bytes are on the disk
    files/ID.part        upload under way, removed at the next start
    batches/ID.json      record of a batch

Every byte is counted for its owner before it is written: uploads and results alike.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections import Counter
from pathlib import Path
from typing import BinaryIO, NamedTuple

from gateway.errors import Conflict, NotFound, NotReady, QuotaReachedError
from gateway.proxy.api.protocol import file_too_large_error
from gateway.server.batches.record_folder import RecordFolder, is_record_name
from gateway.server.batches.records import BatchRecord, FilePurpose, FileRecord
from gateway.store import atomic_file

# Records of one key, which are all in memory.
MAX_FILES = 2000
MAX_BATCHES = 2000
# Batches of one key that have not ended; each keeps a reader and a mark for each line.
MAX_RUNS = 32
_DAY_S = 86_400


class Quotas(NamedTuple):
    """Most bytes of a file, of the files of a key, and of all; days that files are kept."""

    file_bytes: int
    key_bytes: int
    total_bytes: int
    days: int


class FileStore:
    """Methods block for the time of disk writes, and may be called from any thread."""

    def __init__(self, folder: Path, quotas: Quotas) -> None:
        self.quotas = quotas
        self._files_folder = folder / "files"
        self._batches_folder = folder / "batches"
        self._files = RecordFolder(self._files_folder, FileRecord)
        self._batches = RecordFolder(self._batches_folder, BatchRecord)
        self._lock = threading.RLock()
        self.is_closed = False  # another process may read the records
        self._bytes: Counter[str] = Counter()
        self._counted_results: set[str] = set()

    def load(self) -> None:
        """Read the records, and remove the rest of interrupted uploads and deletions.

        A record that another version wrote may be unreadable here. Its bytes stay for that version.
        """
        if not self._files_folder.exists():
            return
        self._files.load()
        self._batches.load()
        for record in self._files.records.values():
            self._bytes[record.owner] += record.bytes
        results = {
            name
            for batch in self._batches.records.values()
            if not batch.has_ended
            for name in (batch.output_id, batch.error_id)
        }
        known_names = self._files.records.keys() | self._files.unreadable_ids | results
        # Bytes without a record can be results of a batch whose record is unreadable.
        keeps_results = bool(self._batches.unreadable_ids)
        for path in self._files_folder.iterdir():
            is_kept = path.name in known_names or (keeps_results and is_record_name(path.name))
            if path.suffix != ".json" and not is_kept:
                path.unlink(missing_ok=True)

    # --- bytes ---

    def grow(self, owner: str, count: int) -> None:
        """Count bytes that will be written for an owner. Raises QuotaReachedError."""
        quotas = self.quotas
        with self._lock:
            if self._bytes[owner] + count > quotas.key_bytes:
                raise QuotaReachedError(
                    f"The files of this key would take more than {quotas.key_bytes:,} bytes.",
                    hint="Delete files, or ask the operator to raise FITSERVE_BATCH_KEY_BYTES.",
                )
            if self._bytes.total() + count > quotas.total_bytes:
                raise QuotaReachedError(
                    f"The files of all keys would take more than {quotas.total_bytes:,} bytes.",
                    hint="Delete files, or ask the operator to raise FITSERVE_BATCH_TOTAL_BYTES.",
                )
            self._bytes[owner] += count

    def count_results(self, owner: str, id_: str, count: int) -> None:
        """Count the bytes of results from before a restart, unless they are a file already. Later
        results are counted by `grow`, so a run that begins a second time counts nothing."""
        with self._lock:
            if id_ not in self._files.records and id_ not in self._counted_results:
                self._counted_results.add(id_)
                self._bytes[owner] += count

    def shrink(self, owner: str, count: int) -> None:
        """Count bytes that are gone."""
        with self._lock:
            self._bytes[owner] -= count
            if not self._bytes[owner]:
                del self._bytes[owner]

    def used_bytes(self, owner: str) -> int:
        return self._bytes[owner]

    # --- files ---

    def path(self, id_: str) -> Path:
        """The path of the bytes of a file or of results."""
        return self._files_folder / id_

    def file(self, owner: str, id_: str) -> FileRecord:
        """A file of an owner. Raises NotFound, also for a file of another owner."""
        record = self._files.records.get(id_)
        if record is None or record.owner != owner or record.expires_at <= time.time():
            raise NotFound(
                f"There is no file {id_[:100]} of this key.",
                hint="GET /v1/files lists the files of the key.",
                param="file_id",
            )
        return record

    def files(self, owner: str) -> list[FileRecord]:
        """The files of an owner, the oldest first."""
        now = time.time()
        with self._lock:
            return [
                record
                for record in self._files.records.values()
                if record.owner == owner and record.expires_at > now
            ]

    def check_new_file(self, owner: str) -> None:
        """Raise QuotaReachedError where an owner has as many files as it may."""
        if len(self.files(owner)) >= MAX_FILES:
            raise QuotaReachedError(
                f"This key has {MAX_FILES} files.", hint="Delete those that are of no use any more."
            )

    def save_file(self, record: FileRecord) -> None:
        """Make bytes that are on the disk a file. Raises NotReady, OSError."""
        with self._lock:
            self.check_open()
            self._files.save(record)

    def check_open(self) -> None:
        """Raise NotReady once the gateway stops: the next one has read the records."""
        if self.is_closed:
            raise NotReady(
                "The gateway stops or is being replaced.",
                hint="Try again in some seconds.",
                retry_after_s=5,
            )

    def delete_file(self, owner: str, id_: str) -> None:
        """Delete a file. Raises NotFound, NotReady, OSError, and Conflict for the input of a batch
        that runs."""
        with self._lock:
            self.check_open()
            record = self.file(owner, id_)
            batch = self._user_of(id_)
            if batch is not None:
                raise Conflict(
                    f"The batch {batch.id} uses the file {id_}.",
                    hint="Cancel the batch first, or wait for its end.",
                )
            self._remove(record)

    def _user_of(self, id_: str) -> BatchRecord | None:
        """The batch that has not ended and reads or writes this file."""
        return next(
            (
                batch
                for batch in self._batches.records.values()
                if id_ in (batch.input_file_id, batch.output_id, batch.error_id)
                and not batch.has_ended
            ),
            None,
        )

    def _remove(self, record: FileRecord) -> None:
        # First the record: bytes without one are removed at the next start.
        self._files.remove(record.id)
        self.path(record.id).unlink(missing_ok=True)
        self.shrink(record.owner, record.bytes)

    # --- batches ---

    def batch(self, owner: str, id_: str) -> BatchRecord:
        """A batch of an owner. Raises NotFound, also for a batch of another owner."""
        record = self._batches.records.get(id_)
        if record is None or record.owner != owner:
            raise NotFound(
                f"There is no batch {id_[:100]} of this key.",
                hint="GET /v1/batches lists the batches of the key.",
                param="batch_id",
            )
        return record

    def batches(self, owner: str) -> list[BatchRecord]:
        """The batches of an owner, the oldest first."""
        with self._lock:
            return [record for record in self._batches.records.values() if record.owner == owner]

    def unfinished_batches(self) -> list[BatchRecord]:
        """All batches that have not ended, the oldest first."""
        with self._lock:
            return [record for record in self._batches.records.values() if not record.has_ended]

    def add_batch(self, record: BatchRecord) -> None:
        """Add a batch. Raises NotFound for its input, QuotaReachedError, NotReady, OSError."""
        with self._lock:
            self.check_open()
            self.file(record.owner, record.input_file_id)
            batches = self.batches(record.owner)
            runs = [batch for batch in batches if not batch.has_ended]
            if len(runs) >= MAX_RUNS or len(batches) >= MAX_BATCHES:
                raise QuotaReachedError(
                    f"This key has {len(runs)} batches that have not ended, and {len(batches)} in"
                    " all.",
                    hint=f"At most {MAX_RUNS} run and {MAX_BATCHES} are kept. Wait, or cancel one.",
                )
            self._batches_folder.mkdir(parents=True, exist_ok=True)
            self._batches.save(record)

    def record(self, id_: str) -> BatchRecord | None:
        """The batch of that id, of any owner."""
        return self._batches.records.get(id_)

    def save_batch(self, record: BatchRecord) -> None:
        """Write a changed batch. Raises NotReady, OSError."""
        with self._lock:
            self.check_open()
            self._batches.save(record)

    def record_batch(self, record: BatchRecord) -> None:
        """Show a batch with new counts, which its result files have on the disk. Never blocks."""
        self._batches.records[record.id] = record

    def sweep(self) -> None:
        """Remove files that have expired, and batches that ended as long ago as files are kept."""
        now = time.time()
        with self._lock:
            if self.is_closed:
                return
            for record in list(self._files.records.values()):
                if record.expires_at <= now and self._user_of(record.id) is None:
                    self._remove(record)
            earliest_end = now - self.quotas.days * _DAY_S
            for batch in list(self._batches.records.values()):
                if batch.has_ended and batch.times.get(batch.status, now) < earliest_end:
                    self._batches.remove(batch.id)
                    self._counted_results -= {batch.output_id, batch.error_id}


class NewFile:
    """An upload under way. Every method blocks for disk writes."""

    def __init__(self, store: FileStore, owner: str) -> None:
        """Begin an upload. Raises QuotaReachedError, OSError."""
        store.check_new_file(owner)
        self.id = new_id("file-")
        self.size = 0
        self._store = store
        self._owner = owner
        self._is_kept = False
        self._path = store.path(f"{self.id}.part")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = open(self._path, "wb", opener=_open_private)  # noqa: SIM115

    def write(self, data: bytes) -> None:
        """Append bytes. Raises TooLarge, QuotaReachedError, OSError."""
        if self.size + len(data) > self._store.quotas.file_bytes:
            raise file_too_large_error(self._store.quotas.file_bytes)
        self._store.grow(self._owner, len(data))
        self.size += len(data)
        self._file.write(data)

    def store(self, filename: str, purpose: FilePurpose, lifetime_s: float) -> FileRecord:
        """Make the bytes a file, which is on the disk then. Raises NotReady, OSError."""
        self._store.check_open()
        self._file.flush()
        os.fsync(self._file.fileno())
        now = time.time()
        record = FileRecord(
            id=self.id,
            owner=self._owner,
            filename=filename,
            purpose=purpose,
            bytes=self.size,
            made_at=now,
            expires_at=now + lifetime_s,
        )
        try:
            self._path.replace(self._store.path(self.id))
        except FileNotFoundError:
            self._store.check_open()  # the next gateway has removed the upload
            raise
        atomic_file.sync_folder(self._path.parent)
        self._store.save_file(record)
        self._is_kept = True
        return record

    def close(self) -> None:
        """End the upload, and remove the bytes unless they are kept."""
        with contextlib.suppress(OSError):
            self._file.close()
        if not self._is_kept:
            self._store.shrink(self._owner, self.size)
            for path in (self._path, self._store.path(self.id)):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def _open_private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)
