"""Tables and paragraphs for people, as wide as the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.cli.terminal import line_width as _width
from gateway.cli.terminal import say, squeeze, wrap
from gateway.visible import visible_line


def print_paragraph(text: object, *, indent: int = 0, first: str = "") -> None:
    """Print a paragraph, wrapped for a terminal. first: the start of its first line. indent: of the
    lines after it."""
    width, begin, rest = _width(), first, " " * indent
    if width is None:
        say(f"{begin}{visible_line(text)}")
        return
    lines = wrap(visible_line(text), width, begin, rest)
    say("\n".join(lines) if lines else begin.rstrip())


def print_table(
    head: tuple[str, ...], rows: Iterable[tuple[object, ...]], *, empty: str = ""
) -> None:
    """Print columns without a frame. empty: the sentence without any row, in place of the head.

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
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]) - 1)]
    indent, width = sum(widths) + 2 * len(widths), _width()
    if width is not None and indent > width:
        _print_narrow_table(lines, width, head)
        return
    for line in lines:
        start = "".join(f"{cell:<{size}}  " for cell, size in zip(line, widths, strict=False))
        if width is None or indent + len(line[-1]) <= width:
            say(f"{start}{line[-1]}".rstrip())
        elif width - indent >= max(_MIN_LAST_COLUMN, *map(len, line[-1].split())):
            print_paragraph(line[-1], indent=indent, first=start)
        else:
            say(start.rstrip())
            if line[-1]:
                print_paragraph(line[-1], indent=4, first="    ")


def _print_narrow_table(lines: list[list[str]], width: int, head: tuple[str, ...]) -> None:
    """Print a table whose columns before the last are too wide."""
    long = max(len(line[-1]) for line in lines) > _MIN_LAST_COLUMN
    columns = None if long else squeeze(lines, width)
    separate_last = columns is None
    columns = columns or squeeze([line[:-1] for line in lines], width)
    for number, line in enumerate(lines):
        titles = number == 0 and any(head)
        if columns:
            say("\n".join(columns[number]))
        elif not titles:
            cells = zip(head[1:-1] if long else head[1:], line[1:], strict=False)
            parts = [
                f"{name.lower()} {cell}".strip() for name, cell in cells if cell not in ("", "-")
            ]
            print_paragraph(f"{line[0]}: {', '.join(parts)}", indent=4)
        if separate_last and (columns or long) and not titles and line[-1] not in ("", "-"):
            print_paragraph(line[-1], indent=4, first="    ")


# A last column narrower than this moves below its row.
_MIN_LAST_COLUMN = 30


def show_changes(changes: Any) -> None:
    """Print a table of old and new values."""
    print_table(
        ("", "BEFORE", "AFTER"),
        [(change["what"], change["old"] or "-", change["new"] or "-") for change in changes],
    )
