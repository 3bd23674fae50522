"""Transactions of SQLite, and a connection that notes their statements to repeat them elsewhere."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Statement = tuple[str, list[Any]]
"""The text of a statement, and its values for each time that it was executed."""


class RecordedConnection(sqlite3.Connection):
    """Notes each statement that changes rows in `statements`, unless that is None."""

    statements: list[Statement] | None = None

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        cursor = super().execute(sql, parameters)
        self._record(sql, [parameters])
        return cursor

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> sqlite3.Cursor:
        rows = [*parameters]
        cursor = super().executemany(sql, rows)
        self._record(sql, rows)
        return cursor

    def _record(self, sql: str, rows: list[Any]) -> None:
        if self.statements is not None and not sql.lstrip().startswith("SELECT"):
            self.statements.append((sql, rows))


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    try:
        connection.execute("COMMIT")
    except sqlite3.Error:
        # A full disk refuses the commit and leaves the transaction open. The next change must not
        # join it.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
