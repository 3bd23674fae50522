"""Tables and paragraphs for people, as wide as the terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from gateway.cli.terminal import line_width as _width
from gateway.cli.terminal import say, squeeze, wrap
from gateway.visible import visible_line


def print_paragraph(text: object, *, indent: int = 0, first: str = "") -> None:
    """Print a paragraph, wrapped for a terminal.

    first: the start of its first line.
    indent: the indent of every line after the first.
    """
    width = _width()
    begin = first
    text_indent = " " * indent
    if width is None:
        say(f"{begin}{visible_line(text)}")
        return
    lines = wrap(visible_line(text), width, begin, text_indent)
    say("\n".join(lines) if lines else begin.rstrip())


def drop_column(
    head: tuple[str, ...],
    rows: Sequence[tuple[object, ...]],
    name: str,
    usual_values: Collection[object],
) -> tuple[tuple[str, ...], Sequence[tuple[object, ...]]]:
    """The table without this column, where every row has one of the usual values there."""
    column = head.index(name)
    if any(row[column] not in usual_values for row in rows):
        return head, rows
    return (*head[:column], *head[column + 1 :]), [
        (*row[:column], *row[column + 1 :]) for row in rows
    ]


def print_table(
    head: tuple[str, ...],
    rows: Iterable[tuple[object, ...]],
    *,
    empty: str = "",
    optional: Sequence[str] = (),
) -> None:
    """Print columns without a frame. empty: the sentence without any row, in place of the head.
    optional: columns to leave out in a narrow terminal, the first first.

    In a narrow terminal the last column wraps or moves below its row, then the other columns wrap.
    Rows that do not fit even so become paragraphs.
    """
    cells = [tuple(row) for row in rows]
    if empty and not cells:
        print_paragraph(empty)
        return
    lines = [[visible_line(cell) for cell in row] for row in ([head] if any(head) else []) + cells]
    if not lines:
        return
    width = _width()
    for name in optional:
        if width is None or _indent(lines) <= width:
            break
        lines = _drop_column(lines, lines[0].index(name))
    widths = _widths(lines)
    indent = _indent(lines)
    if width is not None and indent > width:
        _print_narrow_table(lines, width, tuple(lines[0]) if any(head) else head)
        return
    for number, line in enumerate(lines):
        start = "".join(f"{cell:<{size}}  " for cell, size in zip(line, widths, strict=False))
        if width is None or indent + len(line[-1]) <= width:
            say(f"{start}{line[-1]}".rstrip())
        else:
            _print_wide_row(start, line[-1], width, is_title=number == 0 and any(head))


def _print_wide_row(start: str, text: str, width: int, *, is_title: bool) -> None:
    """Print a row whose last column is too wide: wrapped in its place, or below the row.

    start: the columns before it.
    """
    if width - len(start) >= max(_MIN_LAST_COLUMN, *map(len, text.split())):
        print_paragraph(text, indent=len(start), first=start)
        return
    say(start.rstrip())
    if text and not is_title:
        print_paragraph(text, indent=4, first="    ")


def _widths(lines: list[list[str]]) -> list[int]:
    """The widths of the columns before the last."""
    return [max(len(line[column]) for line in lines) for column in range(len(lines[0]) - 1)]


def _indent(lines: list[list[str]]) -> int:
    """The column where the last column begins."""
    widths = _widths(lines)
    return sum(widths) + 2 * len(widths)


def _drop_column(lines: list[list[str]], column: int) -> list[list[str]]:
    return [line[:column] + line[column + 1 :] for line in lines]


def _print_narrow_table(lines: list[list[str]], width: int, head: tuple[str, ...]) -> None:
    """Print a table whose columns before the last are too wide."""
    is_long = max(len(line[-1]) for line in lines) > _MIN_LAST_COLUMN
    columns = None if is_long else squeeze(lines, width)
    separates_last = columns is None
    columns = columns or squeeze([line[:-1] for line in lines], width)
    for number, line in enumerate(lines):
        titles = number == 0 and any(head)
        if columns:
            say("\n".join(columns[number]))
        elif not titles:
            cells = zip(head[1:-1] if is_long else head[1:], line[1:], strict=False)
            parts = [
                f"{name.lower()} {cell}".strip() for name, cell in cells if cell not in ("", "-")
            ]
            print_paragraph(f"{line[0]}: {', '.join(parts)}", indent=4)
        if separates_last and (columns or is_long) and not titles and line[-1] not in ("", "-"):
            print_paragraph(line[-1], indent=4, first="    ")


# A last column narrower than this moves below its row.
_MIN_LAST_COLUMN = 30


def wish_and_plan(answer: Any) -> list[Any]:
    """The rows of a changed model: of its wish, then of its plan. A name that both have shows the
    plan's row apart."""
    wished_fields = {change["field"] for change in answer["wish"]}
    planned_changes = [
        {**change, "field": f"planned {change['field']}"}
        if change["field"] in wished_fields
        else change
        for change in answer["plan"]
    ]
    return [*answer["wish"], *planned_changes]


def show_changes(changes: Any) -> None:
    """Print a table of old and new values."""
    print_table(
        ("", "BEFORE", "AFTER"),
        [
            (change["field"], change["former"] or "-", change["present"] or "-")
            for change in changes
        ],
    )
