"""What runs, told once more beside the database: DATA_DIR/live/INSTANCE.json has the wish and the attempt of each live engine.

Written before an engine is started and removed after its attempt ended, so that a gateway whose database is lost still knows
every engine it may have started, and what for.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import structlog
from pydantic import ValidationError

from gateway.domain import Attempt, Value, Wish
from gateway.errors import StoreError
from gateway.store import atomic_file as durable
from gateway.store.store import Store

log = structlog.get_logger("fitserve.live")


class Entry(Value):
    wish: Wish
    created_at: float
    attempt: Attempt


class Live:
    """Raises StoreError where a record cannot be written: an engine that nobody would find again must not be started."""

    def __init__(self, data: Path) -> None:
        self._folder = data / "live"

    def write(self, name: str, entry: Entry) -> None:
        try:
            durable.write(self._folder / f"{name}.json", entry.model_dump_json().encode())
        except OSError as error:
            raise StoreError(
                f"{self._folder} cannot be written: {error.strerror}. The engine is not started.",
                hint="Free disk space or repair the permissions of FITSERVE_DATA_DIR.",
            ) from None

    def remove(self, name: str) -> None:
        """One that cannot be removed is harmless: only a database that knows nothing is taught by it."""
        with contextlib.suppress(OSError):
            (self._folder / f"{name}.json").unlink(missing_ok=True)

    def entries(self) -> list[Entry]:
        found = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                found.append(Entry.model_validate_json(path.read_bytes()))
            except (OSError, ValidationError) as error:
                log.warning("a record of a live engine cannot be read", file=str(path), error=str(error)[:300])
        return found


def teach(store: Store, live: Live) -> int:
    """Enter into a database that knows no model what the records say runs; how many attempts that were."""
    if store.models():
        return 0
    entries = live.entries()
    for entry in entries:
        store.restore(entry.wish, entry.created_at, entry.attempt)
    return len(entries)
