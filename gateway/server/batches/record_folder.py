"""A folder with a JSON file for each record, and all of them in memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError

from gateway.logging import Logger
from gateway.server.batches.records import BatchRecord, FileRecord
from gateway.store import atomic_file

log = Logger("fitserve.batches")

Record = TypeVar("Record", FileRecord, BatchRecord)
_NAME = re.compile(r"(?:file-|batch_)[0-9a-f]{24}")


def is_record_name(name: str) -> bool:
    """Whether a name has the form of the id of a record."""
    return _NAME.fullmatch(name) is not None


class RecordFolder(Generic[Record]):
    """The records of one kind. A saved record is on the disk, also after a power cut.

    records: the records by id, the oldest first.
    unreadable_ids: ids of records on the disk that this version cannot read.
    """

    def __init__(self, folder: Path, kind: type[Record]) -> None:
        self.records: dict[str, Record] = {}
        self.unreadable_ids: frozenset[str] = frozenset()
        self._folder = folder
        self._kind: type[Record] = kind

    def load(self) -> None:
        """Read all records. A damaged record is logged and left out. Raises OSError."""
        records = []
        unreadable_ids = set[str]()
        for path in self._folder.glob("*.json"):
            if is_record_name(path.stem):
                try:
                    records.append(self._kind.model_validate_json(path.read_bytes()))
                except ValidationError as error:
                    unreadable_ids.add(path.stem)
                    log.error(  # noqa: TRY400
                        "a record cannot be read", file=str(path), error=str(error)[:300]
                    )
        self.records = {record.id: record for record in sorted(records, key=lambda r: r.made_at)}
        self.unreadable_ids = frozenset(unreadable_ids)

    def save(self, record: Record) -> None:
        """Write a new or changed record. Raises OSError, and then keeps the former one."""
        atomic_file.write(
            self._folder / f"{record.id}.json", record.model_dump_json().encode(), is_durable=True
        )
        self.records[record.id] = record

    def remove(self, id_: str) -> None:
        """Remove a record, if present. Raises OSError."""
        (self._folder / f"{id_}.json").unlink(missing_ok=True)
        atomic_file.sync_folder(self._folder)
        self.records.pop(id_, None)
