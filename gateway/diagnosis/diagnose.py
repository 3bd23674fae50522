"""The failure in a whole log, and what may be said where there is none. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.diagnosis.log_reader import LogReader
from gateway.diagnosis.signatures import Signatures
from gateway.domain import Failure


def diagnose(
    pieces: Iterable[bytes], signatures: Signatures, engine: str | None = None
) -> tuple[Failure, LogReader]:
    """The failure in a whole log, of kind `none` where it proves none; and the reader, which knows
    how far the start came.

    What nothing proves may be likely: that is told to who reads the log, and never to the gateway,
        which would treat the engine by it.

    No failure is no health: only an answer proves that (`reader.answered`).
    """
    reader = LogReader(signatures, engine)
    for piece in pieces:
        reader.feed(piece)
    reader.close()
    none = Failure(
        kind="none", phase=reader.progress.phase, message=_no_failure(reader), proves="nothing"
    )
    return reader.diagnosis or none, reader


def _no_failure(reader: LogReader) -> str:
    if reader.answered:
        return "The engine answered requests, and the log names no failure."
    if reader.ready:
        return (
            "The server started. The log names no failure, and shows no answer either: whether it"
            " is healthy cannot be told."
        )
    return (
        "The log names no failure, and ends before the server started: whether it is healthy cannot"
        " be told."
    )
