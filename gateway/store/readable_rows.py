"""Stored rows that this version can read. A row of another form is left out, with a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from gateway.logging import Logger

log = Logger("fitserve.store")

T = TypeVar("T")
# Numbers of unreadable rows that were logged, by table. Lists are read many times.
_REPORTED_ROWS: set[tuple[str, int]] = set()
_MAX_REPORTS = 10_000


class ReadableRows(list[T]):
    """The values of rows, as a list.

    problem: the sentence on rows that were left out; empty: none.
    """

    problem: str = ""


def read_rows(
    table: str, rows: Iterable[Sequence[Any]], read: Callable[[Sequence[Any]], T]
) -> ReadableRows[T]:
    """The values of the rows.

    rows: each with its number first.
    read: the value of a row. Raises ValueError.
    """
    values = ReadableRows[T]()
    unreadable_count = 0
    for row in rows:
        try:
            values.append(read(row))
        except ValueError as error:
            unreadable_count += 1
            log_unreadable(table, row[0], error)
    if unreadable_count:
        values.problem = left_out_words(unreadable_count)
    return values


def left_out_words(count: int) -> str:
    """The sentence on this many rows that were left out."""
    rows = "1 row is" if count == 1 else f"{count} rows are"
    return f"{rows} left out: this version cannot read the stored form. The log has the reasons."


def log_unreadable(table: str, number: int, error: ValueError) -> None:
    """Log an unreadable row, once."""
    if (table, number) not in _REPORTED_ROWS and len(_REPORTED_ROWS) < _MAX_REPORTS:
        _REPORTED_ROWS.add((table, number))
        log.error("a stored row cannot be read", table=table, row=number, error=_problem(error))


def _problem(error: ValueError) -> str:
    """The kind of the problem and its place, without the stored value."""
    if isinstance(error, ValidationError):
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"]))
        return f"{place}: {problem['type']}" if place else str(problem["type"])
    return type(error).__name__
