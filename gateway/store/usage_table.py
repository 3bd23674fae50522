"""Requests and tokens by day, key and model. Days are of UTC, counted from 1970-01-01."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

from gateway.keys import UsageRow
from gateway.store.database import Database

KEPT_DAYS = 400
# Beyond this number the oldest days are removed.
_MAX_ROWS = 500_000

Part = Literal["day", "key", "model"]
PARTS: tuple[Part, ...] = get_args(Part)
# The values of columns that a question sums up, as SQL.
_EMPTY_PARTS: dict[Part, str] = {"day": "0", "key": "''", "model": "''"}
_SUMS = (
    "requests, prompt_tokens, completion_tokens, cached_tokens, untold_requests, estimated_tokens"
)


class UsageTable:
    """The table of usage. Methods raise StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, rows: Collection[UsageRow]) -> None:
        """Add to the rows of the same day, key and model."""
        updates = ", ".join(f"{name}={name}+excluded.{name}" for name in _SUMS.split(", "))
        with self._database.change() as db:
            newest_day = db.execute("SELECT max(day) FROM usage").fetchone()[0]
            db.executemany(
                f"INSERT INTO usage (day, key, model, {_SUMS})"  # noqa: S608
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
                f" ON CONFLICT (day, key, model) DO UPDATE SET {updates}",
                rows,
            )
            today = max(row.day for row in rows)
            if newest_day is None or today > newest_day:
                db.execute("DELETE FROM usage WHERE day <= ?", (today - KEPT_DAYS,))
                oldest_day = db.execute(
                    "SELECT day FROM usage ORDER BY day DESC LIMIT 1 OFFSET ?", (_MAX_ROWS,)
                ).fetchone()
                if oldest_day is not None:
                    db.execute("DELETE FROM usage WHERE day <= ?", oldest_day)

    def sums(
        self, first: int, last: int, parts: Collection[Part], key: str | None, model: str | None
    ) -> list[UsageRow]:
        """The usage from the first to the last day, by `parts`. Other parts are 0 or ""."""
        columns = ", ".join(name if name in parts else _EMPTY_PARTS[name] for name in PARTS)
        sums = ", ".join(f"sum({name})" for name in _SUMS.split(", "))
        filters = {"key": key, "model": model}
        condition = "".join(
            f" AND {name}=?" for name, value in filters.items() if value is not None
        )
        values = (first, last, *(value for value in filters.values() if value is not None))
        query = (
            f"SELECT {columns}, {sums} FROM usage"  # noqa: S608
            f" WHERE day BETWEEN ? AND ?{condition}"
            " GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"
        )
        return [UsageRow(*row) for row in self._database.rows(query, values)]
