"""The running engines, recorded a second time beside the database: DATA_DIR/live/INSTANCE.json has
the wish and the attempt of each.

Written before an engine is started and removed after its attempt ended, so that a gateway that lost
its database still knows every engine that it may have started, and for which wish.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from pydantic import ValidationError

from gateway.domain import Attempt, Value, Wish
from gateway.errors import StoreError
from gateway.logging import Logger
from gateway.store import atomic_file
from gateway.store.store import Store

log = Logger("fitserve.live")


class RunningEngine(Value):
    """The record of one engine that may run."""

    wish: Wish
    created_at: float
    attempt: Attempt


class RunningEngines:
    """The folder of records. Raises StoreError where a record cannot be written: an engine without
    one could be lost, so it must not be
    started."""

    def __init__(self, data: Path) -> None:
        self._folder = data / "live"

    def write(self, name: str, entry: RunningEngine) -> None:
        try:
            atomic_file.write(self._folder / f"{name}.json", entry.model_dump_json().encode())
        except OSError as error:
            raise StoreError(
                f"{self._folder} cannot be written: {error.strerror}. The engine is not started.",
                hint="Free disk space or repair the permissions of FITSERVE_DATA_DIR.",
            ) from None

    def remove(self, name: str) -> None:
        """A record that cannot be removed is harmless: records are read only into a database that
        knows no model."""
        with contextlib.suppress(OSError):
            (self._folder / f"{name}.json").unlink(missing_ok=True)

    def entries(self) -> list[RunningEngine]:
        found = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                found.append(RunningEngine.model_validate_json(path.read_bytes()))
            except (OSError, ValidationError) as error:
                log.warning(
                    "a record of a live engine cannot be read",
                    file=str(path),
                    error=str(error)[:300],
                )
        return found


def restore_running(store: Store, running: RunningEngines) -> int:
    """Enter the recorded engines into a database that knows no model. Returns how many attempts it
    entered."""
    if store.models():
        return 0
    entries = running.entries()
    for entry in entries:
        store.restore(entry.wish, entry.created_at, entry.attempt)
    return len(entries)
