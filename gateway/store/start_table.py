"""The newest starts that succeeded, with the seconds of their phases.

Rows outlive their models, so a model that is added again has an expected time. The rows have no
seal: a damaged row is left out.
"""

from __future__ import annotations

import contextlib

from gateway.domain import MeasuredStart
from gateway.domain.base import ValidationError
from gateway.store.database import Database

MAX_STARTS = 500


class StartTable:
    """The table of starts. Methods raise StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, start: MeasuredStart) -> None:
        with self._database.change() as db:
            added = db.execute("INSERT INTO starts (start) VALUES (?)", (start.model_dump_json(),))
            db.execute("DELETE FROM starts WHERE id <= ?", ((added.lastrowid or 0) - MAX_STARTS,))

    def rows(self) -> list[MeasuredStart]:
        """The starts, oldest first."""
        rows = []
        for row in self._database.rows("SELECT start FROM starts ORDER BY id"):
            with contextlib.suppress(ValidationError):
                rows.append(MeasuredStart.model_validate_json(row[0]))
        return rows
