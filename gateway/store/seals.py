"""Seals: a checksum of each row's values, which finds bytes that were changed outside of SQLite."""

from __future__ import annotations

import sqlite3
import zlib

SEALED_COLUMNS = {
    "models": "name, wish, created_at, deleting, forgiven_at, generation, change, stopped, used_at",
    "attempts": (
        "id, model, replica, state, plan, fingerprint, port, started_at, ready_at, ended_at,"
        " failure, abilities, generation, asleep, phases"
    ),
    "facts": "id, fact, attempt, learned_at",
    "keys": "name, digest, may, created_at",
    "benches": "id, model, at, bench",
    "wishes": "id, model, number, origin, wish, refused",
}

Sums = list[tuple[int, float]]
"""The number of rows of each table, and the sum of their seals."""


def seal_changes(connection: sqlite3.Connection) -> None:
    """Have the connection seal each row that it adds or changes."""
    connection.create_function("seal_of", -1, compute_seal, deterministic=True)
    for table, columns in SEALED_COLUMNS.items():
        new_seal = f"seal_of(new.{columns.replace(', ', ', new.')})"
        sealed = f"UPDATE {table} SET seal={new_seal} WHERE rowid=new.rowid"  # noqa: S608
        for name, event in (("added", "INSERT"), ("changed", f"UPDATE OF {columns}")):
            connection.execute(
                f"CREATE TEMP TRIGGER {table}_{name} AFTER {event} ON {table} BEGIN {sealed}; END"
            )


def broken_seal(connection: sqlite3.Connection) -> str | None:
    """The table with a row that is not as it was written, in words; None: there is none."""
    for table, columns in SEALED_COLUMNS.items():
        query = f"SELECT 1 FROM {table} WHERE seal IS NOT seal_of({columns}) LIMIT 1"  # noqa: S608
        if connection.execute(query).fetchone():
            return f"a row of {table} is not as it was written"
    return None


def seal_sums(connection: sqlite3.Connection) -> Sums:
    """Number and sum of the seals of each table, which two equal databases share."""
    query = "SELECT count(*), total(seal) FROM"
    return [connection.execute(f"{query} {table}").fetchone() for table in SEALED_COLUMNS]


def compute_seal(*values: object) -> int:
    return zlib.crc32(repr(values).encode())
