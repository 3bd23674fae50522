"""What happened, on the disk: the newest events, bounded by count and age.

Numbers are never used twice. The first one of an empty table is the time, so that they grow too
where a lost database was begun anew. Rows have no seal: a damaged event is left out, and is no
reason to set the models aside.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gateway.domain.facts import EVENT_KINDS, Event
from gateway.store.database import Database

KEPT = 10_000
KEPT_S = 90 * 86400.0
_COLUMNS = "id, at, kind, model, replica, attempt, words, data"


class Bounds(NamedTuple):
    """The numbers of the oldest event that is kept, and of the newest that there was; 0: there was
    none."""

    oldest: int
    newest: int


class EventTable:
    """Raises StoreError, as all of the store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, events: Iterable[Event], now: float) -> list[Event]:
        """The events with their numbers; what is too old goes."""
        with self._database.change() as db:
            newest = _newest(db)
            number = newest or int(now)
            added: list[Event] = []
            for event in events:
                number += 1
                kept = event.evolve(id=number)
                added.append(kept)
                row = (
                    kept.id,
                    kept.at,
                    kept.kind,
                    kept.model,
                    kept.replica,
                    kept.attempt,
                    kept.words,
                    json.dumps(kept.data),
                )
                db.execute(f"INSERT INTO events ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)  # noqa: S608
            db.execute("DELETE FROM events WHERE id <= ? OR at < ?", (number - KEPT, now - KEPT_S))
            db.execute("INSERT OR REPLACE INTO meta VALUES ('newest_event', ?)", (str(number),))
        return added

    def bounds(self) -> Bounds:
        row = self._database.rows("SELECT min(id) FROM events")[0]
        newest = self._database.rows("SELECT value FROM meta WHERE key='newest_event'")
        return Bounds(row[0] or 0, int(newest[0][0]) if newest else 0)

    def after(self, number: int, most: int, model: str | None = None) -> list[Event]:
        """The next events after this one, oldest first."""
        where, values = (" AND model=?", (model,)) if model is not None else ("", ())
        query = f"SELECT {_COLUMNS} FROM events WHERE id > ?{where} ORDER BY id LIMIT ?"  # noqa: S608 - names of this file
        return [*_read(self._database.rows(query, (number, *values, most)))]

    def last(self, most: int, model: str | None = None) -> list[Event]:
        """The newest events, oldest first."""
        where, values = ("WHERE model=?", (model,)) if model is not None else ("", ())
        query = f"SELECT {_COLUMNS} FROM events {where} ORDER BY id DESC LIMIT ?"  # noqa: S608 - names of this file
        return [*_read(reversed(self._database.rows(query, (*values, most))))]

    def cursor(self, reader: str) -> int | None:
        """The number of the last event that a reader has; None: it had none yet."""
        rows = self._database.rows("SELECT value FROM meta WHERE key=?", (f"events_of_{reader}",))
        return int(rows[0][0]) if rows else None

    def note_cursor(self, reader: str, number: int) -> None:
        with self._database.change() as db:
            db.execute(
                "INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"events_of_{reader}", str(number))
            )

    def of_attempts(self) -> list[tuple[int, str]]:
        """The number of a start and the kind of an event about it, for all of them, oldest
        first."""
        return self._database.rows(
            "SELECT attempt, kind FROM events WHERE attempt IS NOT NULL ORDER BY id"
        )

    def models(self) -> dict[str, str]:
        """Of each model that was told of, the kind of the last event about its being here."""
        query = (
            "SELECT model, kind FROM events WHERE kind IN ('model.added', 'model.removed') ORDER"
            " BY id"
        )
        return dict(self._database.rows(query))


def _newest(db: Any) -> int:
    row = db.execute("SELECT value FROM meta WHERE key='newest_event'").fetchone()
    return int(row[0]) if row else 0


def _read(rows: Iterable[Sequence[Any]]) -> Iterable[Event]:
    for row in rows:
        if row[2] in EVENT_KINDS:
            fields = dict(zip(_COLUMNS.split(", "), row, strict=True))
            try:
                fields["data"] = json.loads(row[7])
            except ValueError:
                continue
            yield Event.model_construct(**fields)
