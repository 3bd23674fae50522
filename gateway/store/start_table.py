"""The newest starts that succeeded, with the seconds of their phases.

Rows outlive their models, so a model that is added again has an expected time. They have no seal: a
damaged row is left out.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gateway.domain import MeasuredStart
from gateway.domain.base import ValidationError
from gateway.store.database import Database

KEPT = 500
_SELECT = "SELECT start FROM starts ORDER BY id"


class StartTable:
    """The table of starts. Methods raise StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, start: MeasuredStart) -> None:
        with self._database.change() as db:
            added = db.execute("INSERT INTO starts (start) VALUES (?)", (start.model_dump_json(),))
            db.execute("DELETE FROM starts WHERE id <= ?", ((added.lastrowid or 0) - KEPT,))

    def rows(self) -> list[MeasuredStart]:
        """The starts, oldest first."""
        return _read(self._database.rows(_SELECT))


def starts_at_rest(path: Path) -> list[MeasuredStart]:
    """The starts in a database that a gateway may use; none if it cannot be read."""
    if not path.is_file():
        return []
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1)
        ) as db,
    ):
        return _read(db.execute(_SELECT))
    return []


def _read(rows: Iterable[Sequence[Any]]) -> list[MeasuredStart]:
    found = []
    for row in rows:
        with contextlib.suppress(ValidationError):
            found.append(MeasuredStart.model_validate_json(row[0]))
    return found
