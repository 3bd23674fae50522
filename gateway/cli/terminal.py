"""The one way from the commands to the terminal: nothing that an engine, a model or a user has written steers it.

What is no terminal gets plain lines of one form, whole and without colours. rich is imported where a terminal is there for it.
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
from typing import NamedTuple

import typer

from gateway.domain.units import in_words
from gateway.domain.units import words as size
from gateway.domain.visible import visible, visible_line

# Of a download that no terminal shows: a line for each tenth.
_TENTHS = 10
_CONTINUED = "... "
_FIRST_WIDE = "\u2e80"


def say(text: str = "", *, err: bool = False) -> None:
    """Print a text, and an end of line."""
    typer.echo(visible(text), err=err)


def told(text: str) -> None:
    """Print sentences for people to standard error. A terminal's lines end between words; what is no terminal gets each line whole."""
    if sys.stderr.isatty():
        width = max(20, shutil.get_terminal_size().columns)
        lines = (textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in text.splitlines())
        text = "\n".join("\n".join(line) for line in lines)
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
    """Columns to keep to. In a pipe there are none, unless COLUMNS says so: lines must not break."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return max(40, shutil.get_terminal_size().columns)
    return None


def squeezed(lines: Sequence[Sequence[str]], columns: int, *, head: bool) -> None:
    """Print a table that is wider than the terminal: each of its columns wraps between words."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, show_header=head, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
    for cell in lines[0]:
        made.add_column(Text(cell) if head else "", overflow="fold")
    for line in lines[1:] if head else lines:
        made.add_row(*(Text(cell) for cell in line))
    console = Console(width=columns, color_system=None, legacy_windows=False)
    with console.capture() as drawn:
        console.print(made)
    say("\n".join(line.rstrip() for line in drawn.get().rstrip("\n").split("\n")))


class Talk(NamedTuple):
    """What somebody at a terminal, or a pipe, says to a command. here: a person types; shown: a person reads."""

    here: bool
    shown: bool

    @classmethod
    def now(cls) -> Talk:
        return cls(sys.stdin.isatty(), sys.stdout.isatty())


def everything() -> str:
    """What standard input holds."""
    return sys.stdin.read()


def lines_typed(prompt: str) -> Iterator[str]:
    """What a person types, a line each time, with the history of this session; a text over several lines stands between three double quotes.
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
    """Text that comes in pieces, and is shown at once. On a terminal lines end between words, and what is `dim` is; elsewhere each piece goes out as it
    is."""

    def __init__(self) -> None:
        # The last column stays free: some terminals break a line there, others wait for the next character.
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
        """The character; where it would not fit, after the word that it belongs to was moved to the next line."""
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
    """Where a command is told what is done for it now. A terminal shows that in one line that moves, else each new text is a line."""
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
    """Where a command is told how many bytes are here, of how many: a bar with rate and time left, or a line for each tenth."""
    if not sys.stderr.isatty():
        yield _lines_of(title)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

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
        left = f", {size(round(rate))}/s, {in_words((total - done) / rate)} left" if rate and done < total else ""
        say(f"{title}: {size(done)} of {size(total)} ({tenth * 100 // _TENTHS} %){left}", err=True)

    return line
