"""The records of the process host: one JSON file per instance, always whole or absent, even after a
kill."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from pydantic import ConfigDict, ValidationError

from gateway.domain import Instance, Value
from gateway.domain.base import Field
from gateway.errors import ForeignInstance, HostError
from gateway.hosts.process import procfs
from gateway.secret import REVEAL_CONTEXT, Secret
from gateway.store import atomic_file


class Record(Value):
    """The record of an instance.

    `pid` is None between the decision to start it and its start. `born_in` is the session of the
    gateway; the new process leaves it before it becomes the engine. `is_forked`: the child of a
    prepared process, which notes its exit code.

    Unknown fields are allowed: engines of a later gateway version are still ours.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    model: str
    attempt: int
    fingerprint: str
    port: int
    address: str = "127.0.0.1"
    key: Secret | None = None
    boot_id: str
    pid: int | None = None
    start_ticks: int | None = None
    born_in: int = 0
    is_forked: bool = Field(False, alias="forked")
    cache: str | None = None
    has_exited: bool = Field(False, alias="exited")
    exit_code: int | None = None

    @property
    def holder(self) -> procfs.ProcessStat | None:
        """The engine's main process, even as a zombie."""
        if self.pid is None or self.boot_id != procfs.boot_id():
            return None
        process = procfs.read(self.pid)
        return process if process is not None and process.start_ticks == self.start_ticks else None

    @property
    def leader(self) -> procfs.ProcessStat | None:
        """The engine's main process while it runs."""
        process = self.holder
        return process if process is not None and process.is_alive else None

    def family(self) -> list[procfs.ProcessStat]:
        """The living processes of the engine's session, in any process group."""
        if self.pid is None or self.boot_id != procfs.boot_id():
            return []
        # A pid is reused only after the last member of its session is gone.
        if self.holder is None and procfs.read(self.pid) is not None:
            return []
        return procfs.session(self.pid)

    @property
    def instance(self) -> Instance:
        return Instance(
            name=self.name,
            model=self.model,
            attempt=self.attempt,
            fingerprint=self.fingerprint,
            state="exited" if self.has_exited else "running",
            url=None if self.has_exited else f"http://{url_host(self.address)}:{self.port}",
            key=self.key,
            exit_code=self.exit_code,
            origin="fork" if self.is_forked else "process",
        )


def runs_engine(data: Path) -> bool:
    """Whether an engine of the process host with this data folder runs. Raises OSError."""
    records = Records(records_folder(data))
    for name in records.names():
        with suppress(ForeignInstance):
            record = records.read(name)
            if record is not None and record.leader is not None:
                return True
    return False


def records_folder(data: Path) -> Path:
    return data / "instances"


def url_host(address: str) -> str:
    """The address as URLs have it."""
    return f"[{address}]" if ":" in address else address


class Records:
    """The folder of records. Every method may raise OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, name: str) -> Path:
        """The file of a record. Raises HostError if `name` cannot be a file name."""
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
            raise HostError(
                f"{name!r} cannot be the name of an instance.",
                hint="Use letters, digits, '_', '.' and '-'.",
            )
        return self._folder / f"{name}.json"

    def names(self) -> list[str]:
        return sorted(path.stem for path in self._folder.glob("[A-Za-z0-9_]*.json"))

    def read(self, name: str) -> Record | None:
        """The record, or None. Raises ForeignInstance for a file that is not a record."""
        path = self.path(name)
        try:
            return Record.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError:
            raise ForeignInstance(
                f"{path} holds the name {name}, but is not a record of ours.",
                hint="Inspect the file, and remove it if nothing needs it.",
            ) from None

    def write(self, record: Record) -> Record:
        text = record.model_dump_json(indent=1, context=REVEAL_CONTEXT)
        atomic_file.write(self.path(record.name), text.encode())
        return record

    def exit_file(self, name: str) -> Path:
        """The file with the exit code of a forked engine: `PID CODE`."""
        return self.path(name).with_suffix(".exit")

    def exit_code(self, record: Record) -> int | None:
        """The noted exit code of a forked engine; None: there is none (yet)."""
        try:
            pid, code = self.exit_file(record.name).read_text().split()
            return int(code) if int(pid) == record.pid else None
        except (OSError, ValueError):
            return None

    def remove(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)
        self.exit_file(name).unlink(missing_ok=True)
