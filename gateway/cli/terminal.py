"""The one way from the commands to the terminal: nothing that an engine, a model or a user has written steers it."""

from __future__ import annotations

import codecs
import shutil
import sys
import textwrap
from collections.abc import Iterable

import typer

from gateway.domain.visible import visible


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
