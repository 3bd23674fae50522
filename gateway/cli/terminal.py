"""The one way from the commands to the terminal: nothing that an engine, a model or a user has
written steers it.

What is no terminal gets plain lines of one form, whole and without colours. rich is imported where
a terminal is there for it.
"""

from __future__ import annotations

import codecs
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from typing import NamedTuple

import typer

from gateway.domain.units import in_words
from gateway.domain.units import words as size
from gateway.visible import visible, visible_line

# Of a download that no terminal shows: a line for each tenth.
_TENTHS = 10
_CONTINUED = "... "
_FIRST_WIDE = "\u2e80"


def say(text: str = "", *, err: bool = False) -> None:
    """Print a text, and an end of line."""
    typer.echo(visible(text), err=err)


def told(text: str) -> None:
    """Print sentences for people to standard error. A terminal's lines end between words; what is
    no terminal gets each line whole."""
    if sys.stderr.isatty():
        columns = max(20, shutil.get_terminal_size().columns)
        text = "\n".join("\n".join(wrapped(line, columns)) for line in text.splitlines())
    say(text, err=True)


def pour(pieces: Iterable[bytes], *, raw: bool = False) -> None:
    """Print bytes as they come. raw: just these bytes, escape sequences and all."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    for piece in pieces:
        sys.stdout.buffer.write(piece if raw else visible(decoder.decode(piece)).encode())
        sys.stdout.flush()
    if not raw:
        sys.stdout.buffer.write(decoder.decode(b"", final=True).encode())


def width() -> int | None:
    """Columns to keep to. In a pipe there are none, unless COLUMNS says so: lines must not
    break."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return max(40, shutil.get_terminal_size().columns)
    return None


def wrapped(text: str, columns: int, first: str = "", rest: str = "") -> list[str]:
    """Lines of a paragraph. None ends inside a word: one that is longer than a line, as a path,
    stays whole for who copies it."""
    return textwrap.wrap(
        text,
        columns,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def squeezed(lines: Sequence[Sequence[str]], columns: int) -> list[list[str]] | None:
    """The lines of each row of a table that is wider than the terminal: its cells wrap between
    words. None where the longest words do not fit."""
    cells = [[line[at] for line in lines] for at in range(len(lines[0]))]
    least = [
        max((len(word) for cell in column for word in cell.split()), default=0) for column in cells
    ]
    for gap in (2, 1):
        widths = [max(map(len, column)) for column in cells]
        room = columns - gap * (len(widths) - 1)
        if sum(least) > room:
            continue
        while sum(widths) > room:
            _, widest = max((width, at) for at, width in enumerate(widths) if width > least[at])
            widths[widest] -= 1
        return [_row(line, widths, " " * gap) for line in lines]
    return None


def _row(line: Sequence[str], widths: Sequence[int], gap: str) -> list[str]:
    pieces = [wrapped(cell, max(width, 1)) for cell, width in zip(line, widths, strict=True)]
    return [
        gap.join(f"{piece:<{width}}" for piece, width in zip(parts, widths, strict=True)).rstrip()
        for parts in zip_longest(*pieces, fillvalue="")
    ]


class Talk(NamedTuple):
    """What somebody at a terminal, or a pipe, says to a command. here: a person types; shown: a
    person reads."""

    here: bool
    shown: bool

    @classmethod
    def now(cls) -> Talk:
        return cls(sys.stdin.isatty(), sys.stdout.isatty())


def everything() -> str:
    """What standard input holds."""
    return sys.stdin.read()


def lines_typed(prompt: str) -> Iterator[str]:
    """What a person types, a line each time, with the history of this session; a text over several
    lines stands between three double quotes.
    Ctrl-C drops the line, Ctrl-D ends."""
    with suppress(ImportError):
        import readline  # noqa: F401 - `input` uses it once it is there
    while True:
        try:
            line = input(prompt)
            if line.lstrip().startswith('"""'):
                text = line.lstrip()[3:]
                while not text.rstrip().endswith('"""'):
                    text += "\n" + input(_CONTINUED)
                line = text.rstrip()[:-3].strip("\n")
        except KeyboardInterrupt:
            say("\nCtrl-D or /bye leaves.")
            continue
        except EOFError:
            say()
            return
        yield line


class Flow:
    """Text that comes in pieces, and is shown at once. On a terminal lines end between words, and
    what is `dim` is; elsewhere each piece goes out as it
    is."""

    def __init__(self) -> None:
        # The last column stays free: some terminals break a line there, others wait for the next
        # character.
        self._columns = shutil.get_terminal_size().columns - 1 if sys.stdout.isatty() else 0
        self._dims = self._columns > 0 and not os.environ.get("NO_COLOR")
        self._word = ""
        self._at = 0

    def write(self, piece: str, *, dim: bool = False) -> None:
        text = visible(piece)
        if self._columns:
            text = "".join(map(self._placed, text))
            text = f"\x1b[2m{text}\x1b[0m" if dim and self._dims and text else text
        sys.stdout.write(text)
        sys.stdout.flush()

    def end(self) -> None:
        """An end of line."""
        self.write("\n")

    def _placed(self, char: str) -> str:
        """The character; where it would not fit, after the word that it belongs to was moved to the
        next line."""
        if char == "\n":
            self._at, self._word = 0, ""
            return char
        # Chinese and its like: twice as wide, and a line may end behind each.
        wide = 1 + (char >= _FIRST_WIDE)
        moved = ""
        if self._at + wide > self._columns:
            word = "" if char.isspace() or wide == 2 or len(self._word) >= self._at else self._word
            moved = (f"\x1b[{len(word)}D\x1b[K" if word else "") + "\n" + word
            self._at, self._word = len(word), word
            char = "" if char == " " else char
        self._at += wide if char else 0
        self._word = "" if char.isspace() or wide == 2 else self._word + char
        return moved + char


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """Where a command is told what is done for it now. A terminal shows that in one line that
    moves, else each new text is a line."""
    if not sys.stderr.isatty():
        said = [""]

        def line(text: str) -> None:
            if text != said[0]:
                say(text, err=True)
            said[0] = text

        yield line
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("") as shown:
        yield lambda text: shown.update(Text(visible_line(text)))


@contextmanager
def bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Where a command is told how many bytes are here, of how many: a bar with rate and time left,
    or a line for each tenth."""
    if not sys.stderr.isatty():
        yield _lines_of(title)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    shown = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
    )
    with shown:
        task = shown.add_task(visible_line(title), total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def _lines_of(title: str) -> Callable[[int, int], None]:
    told_of: dict[int, tuple[float, int]] = {}

    def line(done: int, total: int) -> None:
        tenth, now = _TENTHS * done // max(total, 1), time.monotonic()
        if tenth in told_of:
            return
        told_of[tenth] = now, done
        since, first = next(iter(told_of.values()))
        rate = (done - first) / (now - since) if now > since else 0
        left = (
            f", {size(round(rate))}/s, {in_words((total - done) / rate)} left"
            if rate and done < total
            else ""
        )
        say(f"{title}: {size(done)} of {size(total)} ({tenth * 100 // _TENTHS} %){left}", err=True)

    return line
