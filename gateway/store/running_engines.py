"""Records of running engines outside the database: wish and attempt in DATA_DIR/live/INSTANCE.json.

A record is written before the start of an engine and removed after the end of its attempt. So a
gateway that lost its database still knows its engines and their wishes.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from pydantic import ValidationError

from gateway.disk_fault import unwritten_error
from gateway.domain import Attempt, Value, Wish
from gateway.logging import Logger
from gateway.store import atomic_file
from gateway.store.store import Store

log = Logger("fitserve.live")


class RunningEngine(Value):
    """The record of an engine that may run."""

    wish: Wish
    created_at: float
    attempt: Attempt


class RunningEngines:
    """The folder of records.

    Raises StoreError if a record cannot be written: the engine could be lost and must not start.
    """

    def __init__(self, data: Path) -> None:
        self._folder = data / "live"

    def write(self, name: str, entry: RunningEngine) -> None:
        try:
            atomic_file.write(self._folder / f"{name}.json", entry.model_dump_json().encode())
        except OSError as error:
            problem_words = f"{self._folder} cannot be written"
            raise unwritten_error(
                problem_words, self._folder, error, "The engine is not started."
            ) from None

    def remove(self, name: str) -> None:
        """Remove a record. A failure is harmless: only a database without models reads records."""
        with contextlib.suppress(OSError):
            (self._folder / f"{name}.json").unlink(missing_ok=True)

    def entries(self) -> list[RunningEngine]:
        entries = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                entries.append(RunningEngine.model_validate_json(path.read_bytes()))
            except (OSError, ValidationError) as error:
                log.warning(
                    "a record of a live engine cannot be read",
                    file=str(path),
                    error=str(error)[:300],
                )
        return entries


def restore_running(store: Store, running_engines: RunningEngines) -> int:
    """Add the recorded engines to a database without models. Returns the number of attempts."""
    if store.models():
        return 0
    entries = running_engines.entries()
    for entry in entries:
        store.restore(entry.wish, entry.created_at, entry.attempt)
    return len(entries)
