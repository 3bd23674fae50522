"""The check of a batch's input: each wrong line by its number and code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.server.batches.batch_input import (
    MAX_ERRORS,
    InputLimits,
    InputReport,
    InputStart,
    check_input,
    input_lines,
)

ENDPOINT = "/v1/chat/completions"
LIMITS = InputLimits(lines=1000, line_bytes=2000)


def line(custom_id: Any = "a", **fields: Any) -> bytes:
    row = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": {"model": "m"}}
    return json.dumps(row | fields).encode()


def check(folder: Path, *texts: bytes, limits: InputLimits = LIMITS) -> InputReport:
    path = folder / "input"
    path.write_bytes(b"\n".join(texts))
    return check_input(
        path, ENDPOINT, limits, lambda model: "" if model == "m" else f"no model {model}"
    )


def test_right_lines_are_counted_without_empty_ones(tmp_path: Path) -> None:
    report = check(tmp_path, line("a"), b"", b"  \r", line("b"), b"")
    assert report == InputReport(2, ())


WRONG_LINES = {
    "no JSON": (b"{", "invalid_json_line", None),
    "no object": (b"[1]", "invalid_json_line", None),
    "no UTF-8": (line().replace(b'"a"', b'"\xff"'), "invalid_json_line", None),
    "deep": (
        b'{"body":' + b"[" * 900 + b"]" * 900 + b"}",
        "missing_required_parameter",
        "custom_id",
    ),
    "no id": (line(None), "missing_required_parameter", "custom_id"),
    "number as id": (line(7), "invalid_custom_id", "custom_id"),
    "empty id": (line(""), "invalid_custom_id", "custom_id"),
    "long id": (line("a" * 513), "invalid_custom_id", "custom_id"),
    "no method": (line(method=None), "missing_required_parameter", "method"),
    "GET": (line(method="GET"), "invalid_method", "method"),
    "another path": (line(url="/v1/completions"), "invalid_url", "url"),
    "no body": (line(body=None), "missing_required_parameter", "body"),
    "body without fields": (line(body=[]), "invalid_request", "body"),
    "no model": (line(body={}), "missing_required_parameter", "body.model"),
    "unknown model": (line(body={"model": "x"}), "model_not_found", "body.model"),
    "stream": (line(body={"model": "m", "stream": True}), "unsupported_parameter", "body.stream"),
    "long": (line(body={"model": "m", "user": "x" * 3000}), "line_too_large", None),
}


@pytest.mark.parametrize(("text", "code", "param"), WRONG_LINES.values(), ids=WRONG_LINES)
def test_a_wrong_line_has_its_number_and_code(
    text: bytes, code: str, param: str | None, tmp_path: Path
) -> None:
    report = check(tmp_path, line("first"), b"", text, line("last"))
    assert [(error.code, error.param, error.line) for error in report.errors] == [(code, param, 3)]
    assert report.total == 3


def test_an_id_that_stands_twice_is_found(tmp_path: Path) -> None:
    report = check(tmp_path, line("a"), line("b"), line("a"))
    assert [(error.code, error.line) for error in report.errors] == [("duplicate_custom_id", 3)]


def test_errors_and_lines_are_bounded(tmp_path: Path) -> None:
    assert len(check(tmp_path, *[b"{"] * 2 * MAX_ERRORS).errors) == MAX_ERRORS
    report = check(tmp_path, line("a"), line("b"), line("c"), limits=InputLimits(2, 2000))
    assert [(error.code, error.line) for error in report.errors] == [("too_many_lines", 3)]


def test_a_file_without_lines_is_refused(tmp_path: Path) -> None:
    assert [error.code for error in check(tmp_path, b"", b" ").errors] == ["empty_file"]


def test_lines_are_read_with_numbers_and_bodies_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "input"
    body = b'{"model":  "m", "x": 1e400}'
    text = b'{"custom_id":"b","method":"POST","url":"%b","body":%b}' % (ENDPOINT.encode(), body)
    path.write_bytes(line("a") + b"\n\n" + text)
    rows = list(input_lines(path, ENDPOINT, LIMITS))
    assert [(row.number, row.custom_id, row.model) for row in rows] == [
        (0, "a", "m"),
        (1, "b", "m"),
    ]
    assert rows[1].body == body
    start = InputStart(rows[1].number, rows[1].offset)
    assert list(input_lines(path, ENDPOINT, LIMITS, start)) == rows[1:]
    assert list(input_lines(path, ENDPOINT, LIMITS, is_done=lambda number: number == 1)) == rows[:1]
