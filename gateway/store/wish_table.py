"""The wishes of each model, in force and refused, bounded by count and size.

Rows are part of the transaction that changes the model. They leave with their model.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from gateway.domain import Wish
from gateway.domain.wish import WishOrigin, WishVersion
from gateway.store.database import Database
from gateway.store.readable_rows import log_unreadable

# Bounds of the wishes in force, and of the refused ones, for each model. A chat template is part of
# a wish, so the characters count too.
MAX_WISHES = 50
MAX_CHARACTERS = 4 * 1024 * 1024
# The present wish and the one before stay in any case.
_MIN_WISHES = 2

_PRUNE = """
DELETE FROM wishes WHERE model=? AND id NOT IN (
    SELECT id FROM (
        SELECT id, row_number() OVER newest AS place, sum(length(wish)) OVER newest AS size
        FROM wishes WHERE model=?
        WINDOW newest AS (PARTITION BY refused='' ORDER BY id DESC)
    ) WHERE place <= ? OR (place <= ? AND size <= ?)
)
"""


class WishTable:
    """The table of wishes. Methods raise StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def versions(self, model: str) -> list[WishVersion]:
        """The wishes of a model, oldest first. An unreadable one keeps its place."""
        query = (
            "SELECT id, model, number, origin, wish, refused FROM wishes WHERE model=? ORDER BY id"
        )
        return [_read_version(row) for row in self._database.rows(query, (model,))]


def _read_version(row: Sequence[Any]) -> WishVersion:
    id_, model, number, origin_json, wish_json, reason = row
    origin = WishOrigin(at=0.0)
    try:
        origin = WishOrigin.model_validate_json(origin_json)
        wish = Wish.model_validate_json(wish_json)
    except ValueError as error:
        log_unreadable("wishes", id_, error)
        return WishVersion(
            number=number, origin=origin, wish=Wish(name=model), refused=reason, is_readable=False
        )
    return WishVersion(number=number, origin=origin, wish=wish, refused=reason)


def add_version(db: sqlite3.Connection, wish: Wish, origin: WishOrigin) -> None:
    """Add a wish to the history of its model, in the transaction `db`."""
    query = "SELECT coalesce(max(number), 0) FROM wishes WHERE model=?"
    number = db.execute(query, (wish.name,)).fetchone()[0] + 1
    row = wish.name, number, origin.model_dump_json(), wish.model_dump_json()
    db.execute("INSERT INTO wishes (model, number, origin, wish) VALUES (?, ?, ?, ?)", row)
    db.execute(_PRUNE, (wish.name, wish.name, _MIN_WISHES, MAX_WISHES, MAX_CHARACTERS))


def refuse_version(db: sqlite3.Connection, model: str, reason: str) -> None:
    """Note that the newest wish was given up."""
    db.execute(
        "UPDATE wishes SET refused=? WHERE id=(SELECT max(id) FROM wishes WHERE model=?)",
        (reason, model),
    )


def complete_version(db: sqlite3.Connection, wish: Wish) -> None:
    """Replace the wish in force by one whose commits are known."""
    query = (
        "UPDATE wishes SET wish=? WHERE id=(SELECT max(id) FROM wishes WHERE model=? AND"
        " refused='')"
    )
    db.execute(query, (wish.model_dump_json(), wish.name))


def remove_versions(db: sqlite3.Connection, model: str) -> None:
    """Forget the history of a model."""
    db.execute("DELETE FROM wishes WHERE model=?", (model,))
