"""The newest events on disk, bounded by count and age.

Numbers are never reused. The first number of an empty table is the time, so numbers also grow after
the loss of a database. Rows have no seal: a damaged event is left out, and the models stay.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gateway.domain.facts import EVENT_KINDS, Event
from gateway.store.database import Database

MAX_EVENTS = 10_000
EVENT_LIFE_S = 90 * 86400.0
_COLUMNS = "id, at, kind, model, replica, attempt, words, data"
_INSERT = f"INSERT INTO events ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"  # noqa: S608
_SELECT = f"SELECT {_COLUMNS} FROM events"  # noqa: S608


class Bounds(NamedTuple):
    """The numbers of the oldest stored event and of the newest ever; 0: none."""

    oldest: int
    newest: int


class EventTable:
    """The table of events. Methods raise StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, events: Iterable[Event], now_s: float) -> list[Event]:
        """Store events and remove too old ones. Returns the events with their numbers."""
        with self._database.change() as db:
            newest_number = _newest_number(db)
            number = newest_number or int(now_s)
            added: list[Event] = []
            for event in events:
                number += 1
                stored_event = event.evolve(id=number)
                added.append(stored_event)
                row = (
                    stored_event.id,
                    stored_event.at,
                    stored_event.kind,
                    stored_event.model,
                    stored_event.replica,
                    stored_event.attempt,
                    stored_event.words,
                    json.dumps(stored_event.data),
                )
                db.execute(_INSERT, row)
            oldest_bounds = number - MAX_EVENTS, now_s - EVENT_LIFE_S
            db.execute("DELETE FROM events WHERE id <= ? OR at < ?", oldest_bounds)
            db.execute("INSERT OR REPLACE INTO meta VALUES ('newest_event', ?)", (str(number),))
        return added

    def bounds(self) -> Bounds:
        row = self._database.rows("SELECT min(id) FROM events")[0]
        newest_rows = self._database.rows("SELECT value FROM meta WHERE key='newest_event'")
        return Bounds(row[0] or 0, int(newest_rows[0][0]) if newest_rows else 0)

    def events_after(self, number: int, limit: int, model: str | None = None) -> list[Event]:
        """The next events after this one, oldest first."""
        condition, values = (" AND model=?", (model,)) if model is not None else ("", ())
        query = f"{_SELECT} WHERE id > ?{condition} ORDER BY id LIMIT ?"
        return [*_read_events(self._database.rows(query, (number, *values, limit)))]

    def last(self, limit: int, model: str | None = None) -> list[Event]:
        """The newest events, oldest first."""
        condition, values = ("WHERE model=?", (model,)) if model is not None else ("", ())
        query = f"{_SELECT} {condition} ORDER BY id DESC LIMIT ?"
        return [*_read_events(reversed(self._database.rows(query, (*values, limit))))]

    def cursor(self, reader: str) -> int | None:
        """The number of the last event that a reader received; None: none yet."""
        rows = self._database.rows("SELECT value FROM meta WHERE key=?", (f"events_of_{reader}",))
        return int(rows[0][0]) if rows else None

    def record_cursor(self, reader: str, number: int) -> None:
        with self._database.change() as db:
            db.execute(
                "INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"events_of_{reader}", str(number))
            )

    def attempt_kinds(self) -> list[tuple[int, str]]:
        """Attempt and kind of every event about an attempt, oldest first."""
        return self._database.rows(
            "SELECT attempt, kind FROM events WHERE attempt IS NOT NULL ORDER BY id"
        )

    def models(self) -> dict[str, str]:
        """The kind of the last event that added or removed a model, by model."""
        query = (
            "SELECT model, kind FROM events WHERE kind IN ('model.added', 'model.removed') ORDER"
            " BY id"
        )
        return dict(self._database.rows(query))


def _newest_number(db: Any) -> int:
    row = db.execute("SELECT value FROM meta WHERE key='newest_event'").fetchone()
    return int(row[0]) if row else 0


def _read_events(rows: Iterable[Sequence[Any]]) -> Iterable[Event]:
    for row in rows:
        if row[2] in EVENT_KINDS:
            fields = dict(zip(_COLUMNS.split(", "), row, strict=True))
            try:
                fields["data"] = json.loads(row[7])
            except ValueError:
                continue
            yield Event.model_construct(**fields)
