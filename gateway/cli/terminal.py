"""The one way from the commands to the terminal: nothing that an engine, a model or a user has written steers it."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterable

import typer

from gateway.domain.visible import visible


def say(text: str = "", *, err: bool = False) -> None:
    """Print a text, and an end of line."""
    typer.echo(visible(text), err=err)


def pour(pieces: Iterable[bytes], *, raw: bool = False) -> None:
    """Print bytes as they come. raw: just these bytes, escape sequences and all."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    for piece in pieces:
        sys.stdout.buffer.write(piece if raw else visible(decoder.decode(piece)).encode())
        sys.stdout.flush()
    if not raw:
        sys.stdout.buffer.write(decoder.decode(b"", final=True).encode())
