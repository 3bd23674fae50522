"""Terminal output of all commands. Text from engines, models and users cannot control the terminal.

Pipes and files get plain lines, unwrapped and without colours. Only a terminal imports rich.
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

from gateway.domain.units import duration_text, format_bytes
from gateway.visible import visible, visible_line

# A download prints one line for each tenth if there is no terminal.
_TENTHS = 10
_CONTINUATION_PROMPT = "... "
_FIRST_WIDE_CHARACTER = "\u2e80"


def say(text: str = "", *, is_error: bool = False) -> None:
    """Print a text and a line end."""
    typer.echo(visible(text), err=is_error)


def print_message(text: str) -> None:
    """Print sentences to standard error. Only a terminal gets wrapped lines."""
    if sys.stderr.isatty():
        columns = max(20, shutil.get_terminal_size().columns)
        text = "\n".join("\n".join(wrap(line, columns)) for line in text.splitlines())
    say(text, is_error=True)


def print_bytes(pieces: Iterable[bytes], *, is_raw: bool = False) -> None:
    """Print bytes as they arrive. is_raw: unchanged, with escape sequences."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    for piece in pieces:
        sys.stdout.buffer.write(piece if is_raw else visible(decoder.decode(piece)).encode())
        sys.stdout.flush()
    if not is_raw:
        sys.stdout.buffer.write(decoder.decode(b"", final=True).encode())


def line_width() -> int | None:
    """The columns of a line. None in a pipe without COLUMNS: its lines must not wrap."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return max(40, shutil.get_terminal_size().columns)
    return None


def wrap(text: str, columns: int, first: str = "", indent: str = "") -> list[str]:
    """The lines of a paragraph. A word longer than a line stays whole, so that paths can be
    copied."""
    return textwrap.wrap(
        text,
        columns,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def squeeze(lines: Sequence[Sequence[str]], columns: int) -> list[list[str]] | None:
    """The lines of each row of a table that is wider than the terminal, with wrapped cells. None
    where the longest words do not fit."""
    cells = [[line[column_index] for line in lines] for column_index in range(len(lines[0]))]
    min_widths = [
        max((len(word) for cell in column for word in cell.split()), default=0) for column in cells
    ]
    for gap in (2, 1):
        widths = [max(map(len, column)) for column in cells]
        available = columns - gap * (len(widths) - 1)
        if sum(min_widths) > available:
            continue
        while sum(widths) > available:
            _, widest = max(
                (width, column_index)
                for column_index, width in enumerate(widths)
                if width > min_widths[column_index]
            )
            widths[widest] -= 1
        return [_wrap_row(line, widths, " " * gap) for line in lines]
    return None


def _wrap_row(line: Sequence[str], widths: Sequence[int], gap: str) -> list[str]:
    pieces = [wrap(cell, max(width, 1)) for cell, width in zip(line, widths, strict=True)]
    return [
        gap.join(f"{piece:<{width}}" for piece, width in zip(parts, widths, strict=True)).rstrip()
        for parts in zip_longest(*pieces, fillvalue="")
    ]


class StandardStreams(NamedTuple):
    """Whether standard input and standard output are terminals."""

    is_input_terminal: bool
    is_output_terminal: bool

    @classmethod
    def detect(cls) -> StandardStreams:
        return cls(sys.stdin.isatty(), sys.stdout.isatty())


def read_stdin() -> str:
    """The whole text of standard input."""
    return sys.stdin.read()


def typed_lines(prompt: str) -> Iterator[str]:
    """The lines that a person types, with the history of this session.

    Three double quotes begin and end a text of several lines. Ctrl-C drops the line, Ctrl-D ends.
    """
    with suppress(ImportError):
        import readline  # noqa: F401 - `input` uses it once it is imported
    while True:
        try:
            line = input(prompt)
            if line.lstrip().startswith('"""'):
                text = line.lstrip()[3:]
                while not text.rstrip().endswith('"""'):
                    text += "\n" + input(_CONTINUATION_PROMPT)
                line = text.rstrip()[:-3].strip("\n")
        except KeyboardInterrupt:
            say("\nCtrl-D or /bye leaves.")
            continue
        except EOFError:
            say()
            return
        yield line


class StreamedText:
    """Text that is printed piece by piece. Only a terminal gets wrapped lines and dim text."""

    def __init__(self) -> None:
        # The last column stays free: terminals differ in when they wrap there.
        self._columns = shutil.get_terminal_size().columns - 1 if sys.stdout.isatty() else 0
        self._dims = self._columns > 0 and not os.environ.get("NO_COLOR")
        self._word = ""
        self._at = 0

    def write(self, piece: str, *, is_dim: bool = False) -> None:
        text = visible(piece)
        if self._columns:
            text = "".join(map(self._wrap_word, text))
            text = f"\x1b[2m{text}\x1b[0m" if is_dim and self._dims and text else text
        sys.stdout.write(text)
        sys.stdout.flush()

    def finish(self) -> None:
        """Print a line end."""
        self.write("\n")

    def _wrap_word(self, char: str) -> str:
        """The character, and before it the moves that bring its word to the next line."""
        if char == "\n":
            self._at = 0
            self._word = ""
            return char
        # Chinese and similar characters are twice as wide, and a line may end after each.
        columns = 1 + (char >= _FIRST_WIDE_CHARACTER)
        cursor_codes = ""
        if self._at + columns > self._columns:
            word = (
                "" if char.isspace() or columns == 2 or len(self._word) >= self._at else self._word
            )
            cursor_codes = (f"\x1b[{len(word)}D\x1b[K" if word else "") + "\n" + word
            self._at = len(word)
            self._word = word
            char = "" if char == " " else char
        self._at += columns if char else 0
        self._word = "" if char.isspace() or columns == 2 else self._word + char
        return cursor_codes + char


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """A function that shows the current state: one changing line on a terminal, else a line for
    each new text."""
    if not sys.stderr.isatty():
        former_lines = [""]

        def line(text: str) -> None:
            if text != former_lines[0]:
                say(text, is_error=True)
            former_lines[0] = text

        yield line
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("") as spinner:
        yield lambda text: spinner.update(Text(visible_line(text)))


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A function of done and total bytes: it shows a bar with rate and time left, or a line for
    each tenth."""
    if not sys.stderr.isatty():
        yield _progress_lines(title)
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

    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
    )
    with progress:
        task = progress.add_task(visible_line(title), total=None)
        yield lambda bytes_done, total: progress.update(task, completed=bytes_done, total=total)


def _progress_lines(title: str) -> Callable[[int, int], None]:
    reported_bytes: dict[int, tuple[float, int]] = {}

    def report(bytes_done: int, total: int) -> None:
        tenth = _TENTHS * bytes_done // max(total, 1)
        now_s = time.monotonic()
        if tenth in reported_bytes:
            return
        reported_bytes[tenth] = now_s, bytes_done
        start_s, start_bytes = next(iter(reported_bytes.values()))
        rate = (bytes_done - start_bytes) / (now_s - start_s) if now_s > start_s else 0
        remaining = (
            f", {format_bytes(round(rate))}/s, {duration_text((total - bytes_done) / rate)} left"
            if rate and bytes_done < total
            else ""
        )
        say(
            f"{title}: {format_bytes(bytes_done)} of {format_bytes(total)}"
            f" ({tenth * 100 // _TENTHS} %){remaining}",
            is_error=True,
        )

    return report
