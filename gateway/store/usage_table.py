"""Requests and tokens by day, key and model, on the disk. Days are of UTC, counted from
1970-01-01."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

from gateway.keys import UsageRow
from gateway.store.database import Database

KEPT_DAYS = 400
# Of more the oldest days go.
_MOST_ROWS = 500_000

Part = Literal["day", "key", "model"]
PARTS: tuple[Part, ...] = get_args(Part)
_SUMS = "requests, prompt_tokens, completion_tokens, cached_tokens, untold_requests"


class UsageTable:
    """Raises StoreError, as all of the store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, rows: Collection[UsageRow]) -> None:
        """To what is there of the same day, key and model."""
        more = ", ".join(f"{name}={name}+excluded.{name}" for name in _SUMS.split(", "))
        with self._database.change() as db:
            newest = db.execute("SELECT max(day) FROM usage").fetchone()[0]
            db.executemany(
                f"INSERT INTO usage (day, key, model, {_SUMS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?) "  # noqa: S608 - names of this file
                f"ON CONFLICT (day, key, model) DO UPDATE SET {more}",
                rows,
            )
            today = max(row.day for row in rows)
            if newest is None or today > newest:
                db.execute("DELETE FROM usage WHERE day <= ?", (today - KEPT_DAYS,))
                over = db.execute(
                    "SELECT day FROM usage ORDER BY day DESC LIMIT 1 OFFSET ?", (_MOST_ROWS,)
                ).fetchone()
                if over is not None:
                    db.execute("DELETE FROM usage WHERE day <= ?", over)

    def sums(
        self, first: int, last: int, by: Collection[Part], key: str | None, model: str | None
    ) -> list[UsageRow]:
        """Of these days, both among them. What is not in `by` is summed up, and is 0 or "" in the
        rows."""
        columns = ", ".join(
            name if name in by else ("0" if name == "day" else "''") for name in PARTS
        )
        sums = ", ".join(f"sum({name})" for name in _SUMS.split(", "))
        wanted = {"key": key, "model": model}
        where = "".join(f" AND {name}=?" for name, value in wanted.items() if value is not None)
        values = (first, last, *(value for value in wanted.values() if value is not None))
        query = f"SELECT {columns}, {sums} FROM usage WHERE day BETWEEN ? AND ?{where} GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"  # noqa: S608
        return [UsageRow(*row) for row in self._database.rows(query, values)]
