"""The lines of a batch's input: their check before the batch runs, and their reading.

A line is a JSON object with `custom_id`, `method`, `url` and `body`. Lines have numbers from 0, and
empty lines have none. Nothing here keeps more than one line and a digest of each `custom_id`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from gateway.decoding import DECODE_ERRORS
from gateway.server.batches.records import BatchError

# Errors of one batch that are kept; a file of wrong lines has one for each.
MAX_ERRORS = 100
_MAX_ID_CHARACTERS = 512
_DIGEST_BYTES = 16
# Lines between two offers of the interpreter to other threads.
_LINES_AT_ONCE = 50


class InputLimits(NamedTuple):
    """Most lines of a batch, and most bytes of a line."""

    lines: int
    line_bytes: int


class InputReport(NamedTuple):
    """The result of a check. total: lines with a request."""

    total: int
    errors: tuple[BatchError, ...]


class InputLine(NamedTuple):
    """A checked line.

    body: the request in JSON.
    offset: bytes of the file before the line.
    """

    number: int
    custom_id: str
    model: str
    body: bytes
    offset: int = 0


class InputStart(NamedTuple):
    """The first line to read: its number, and the bytes of the file before it."""

    number: int = 0
    offset: int = 0


class _LineFields(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


class _BodyFields(msgspec.Struct):
    model: Any = None
    stream: Any = None


_LINE = msgspec.json.Decoder(_LineFields)
_BODY = msgspec.json.Decoder(_BodyFields)


class InputProblem(Exception):
    """A wrong line, with OpenAI's code of the error and the field."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def check_input(
    path: Path, endpoint: str, limits: InputLimits, model_problem: Callable[[str], str]
) -> InputReport:
    """Check all lines of a file. model_problem: the reason why a model cannot answer; empty: it
    can. Raises OSError."""
    digests: set[bytes] = set()
    problems_by_model: dict[str, str] = {}
    errors: list[BatchError] = []
    total = 0
    with path.open("rb") as file:
        for row, _, text in _texts(file, limits.line_bytes):
            total += 1
            if total > limits.lines:
                message = f"The file has more than {limits.lines:,} lines."
                errors.append(BatchError(code="too_many_lines", message=message, line=row))
                break
            try:
                line = _read(text, endpoint, limits.line_bytes)
                _check_id(line.custom_id, digests)
                _check_model(line.model, problems_by_model, model_problem)
            except InputProblem as error:
                errors.append(
                    BatchError(code=error.code, message=str(error), param=error.param, line=row)
                )
                if len(errors) == MAX_ERRORS:
                    break
    if not total:
        errors.append(BatchError(code="empty_file", message="The file has no line."))
    return InputReport(total, tuple(errors))


def input_lines(
    path: Path,
    endpoint: str,
    limits: InputLimits,
    start: InputStart = InputStart(),  # noqa: B008
    is_done: Callable[[int], bool] = lambda _: False,
) -> Iterator[InputLine]:
    """The lines of a file that was checked. Raises OSError, InputProblem.

    is_done: whether the line of a number is left out.
    """
    with path.open("rb") as file:
        file.seek(start.offset)
        texts = _texts(file, limits.line_bytes)
        for number, (_, offset, text) in enumerate(texts, start.number):
            if not is_done(number):
                line = _read(text, endpoint, limits.line_bytes)
                yield line._replace(number=number, offset=start.offset + offset)


def _texts(file: BinaryIO, line_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """The lines that are not empty, with their numbers from 1 and the bytes before them. Of a line
    that is too long only the beginning is read."""
    row = next_offset = 0
    while text := file.readline(line_bytes + 2):
        offset = next_offset
        next_offset = next_offset + len(text)
        row += 1
        if row % _LINES_AT_ONCE == 0:
            time.sleep(0)  # the event loop takes its turn
        end = text
        while len(end) == line_bytes + 2 and not end.endswith(b"\n"):
            end = file.readline(line_bytes + 2)
            next_offset += len(end)
        if text.strip():
            yield row, offset, text


def _read(text: bytes, endpoint: str, line_bytes: int) -> InputLine:
    """A line of the input. Raises InputProblem."""
    if len(text.rstrip(b"\r\n")) > line_bytes:
        raise InputProblem("line_too_large", f"The line is over {line_bytes:,} bytes.")
    try:
        text.decode()  # msgspec leaves the body raw and does not check its UTF-8
        line = _LINE.decode(text)
    except DECODE_ERRORS:
        raise InputProblem("invalid_json_line", "The line is not a JSON object in UTF-8.") from None
    has_body = bytes(line.body) not in (b"", b"null")
    values = {"custom_id": line.custom_id, "method": line.method, "url": line.url}
    for field, value in {**values, "body": has_body or None}.items():
        if value is None:
            raise InputProblem("missing_required_parameter", f"`{field}` is missing.", field)
    if not isinstance(line.custom_id, str) or not 0 < len(line.custom_id) <= _MAX_ID_CHARACTERS:
        raise InputProblem(
            "invalid_custom_id",
            f"`custom_id` is not a text of 1 to {_MAX_ID_CHARACTERS} characters.",
            "custom_id",
        )
    if line.method != "POST":
        raise InputProblem("invalid_method", "`method` is not POST.", "method")
    if line.url != endpoint:
        raise InputProblem("invalid_url", f"`url` is not {endpoint}, as in the batch.", "url")
    try:
        body = _BODY.decode(line.body)
    except DECODE_ERRORS:
        raise InputProblem("invalid_request", "`body` is not a JSON object.", "body") from None
    if not isinstance(body.model, str) or not body.model:
        raise InputProblem("missing_required_parameter", "`model` is missing.", "body.model")
    if body.stream not in (None, False):
        raise InputProblem(
            "unsupported_parameter", "Answers of a batch are not streamed.", "body.stream"
        )
    return InputLine(0, line.custom_id, body.model, bytes(line.body))


def _check_model(
    model: str, problems_by_model: dict[str, str], model_problem: Callable[[str], str]
) -> None:
    """Raise InputProblem for a model that cannot answer."""
    if model not in problems_by_model:
        problems_by_model[model] = model_problem(model)
    if problems_by_model[model]:
        raise InputProblem("model_not_found", problems_by_model[model], "body.model")


def _check_id(custom_id: str, digests: set[bytes]) -> None:
    """Raise InputProblem for an id that an earlier line has."""
    digest = hashlib.blake2b(custom_id.encode(errors="replace"), digest_size=_DIGEST_BYTES).digest()
    if digest in digests:
        raise InputProblem(
            "duplicate_custom_id", "An earlier line has the same `custom_id`.", "custom_id"
        )
    digests.add(digest)
