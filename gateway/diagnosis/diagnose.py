"""The failure in a whole log. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.diagnosis.log_reader import LogReader
from gateway.diagnosis.signatures import Signatures
from gateway.domain import Failure


def diagnose(
    pieces: Iterable[bytes], signatures: Signatures, engine: str | None = None
) -> tuple[Failure, LogReader]:
    """The failure in a whole log, of kind `none` without a proof, and the reader of the log.

    The failure may be only likely: it is for people, never for the gateway, which would treat the
    engine by it. A log without a failure does not prove health; an answer does
    (`reader.has_answered`).
    """
    reader = LogReader(signatures, engine)
    for piece in pieces:
        reader.feed(piece)
    reader.close()
    no_failure = Failure(
        kind="none",
        phase=reader.progress.phase,
        message=_no_failure(reader),
        proven_subject="nothing",
    )
    return reader.diagnosis or no_failure, reader


def _no_failure(reader: LogReader) -> str:
    if reader.is_empty:
        return "The log is empty."
    if number := reader.failed_requests:
        requests = "a request" if number == 1 else f"{number} requests"
        return (
            f"The engine serves, and {requests} failed with status 500 by an error of the request"
            " itself. The log names no failure of the engine."
        )
    if reader.has_answered:
        return "The engine answered requests, and the log names no failure."
    if reader.is_ready:
        return (
            "The server started. The log names no failure and shows no answer, so the health of the"
            " engine is unknown."
        )
    return (
        "The log names no failure and ends before the server started, so the health of the engine"
        " is unknown."
    )
