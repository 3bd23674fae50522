"""The form of an upload, in pieces of any size."""

from __future__ import annotations

import pytest

from gateway.errors import BadRequest
from gateway.server.batches.file_form import FileForm

TYPE = "multipart/form-data; boundary=line"


def part(name: str, content: bytes, rest: str = "") -> bytes:
    head = f'--line\r\ncontent-disposition: form-data; name="{name}"{rest}\r\n\r\n'
    return head.encode() + content + b"\r\n"


END = b"--line--\r\n"
FILE = part("file", b'{"a": 1}\r\n\r\n--lin\n', '; filename="C:\\\\x/in\u0007put.jsonl"')


def read(body: bytes, size: int = 10_000) -> tuple[FileForm, bytes]:
    pieces: list[bytes] = []
    form = FileForm(TYPE, pieces.append)
    for start in range(0, len(body), size):
        form.feed(body[start : start + size])
    return form, b"".join(pieces)


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_the_file_passes_as_it_is_in_pieces_of_any_size(size: int) -> None:
    form, content = read(part("purpose", b"batch") + FILE + part("note", "é".encode()) + END, size)
    assert content == b'{"a": 1}\r\n\r\n--lin\n'
    assert form.fields["purpose"] == "batch"
    assert form.filename == "input.jsonl"
    assert form.is_complete


def test_a_form_that_breaks_off_is_not_complete() -> None:
    form, _ = read(part("purpose", b"batch") + FILE)
    assert not form.is_complete


@pytest.mark.parametrize(
    "body",
    [
        b"words",
        FILE + FILE + END,
        part("purpose", b"batch") + part("purpose", b"batch") + END,
        part("purpose", b"x" * 2000) + END,
        b"".join(part(f"field{number}", b"") for number in range(20)) + END,
        b"--line\r\ncontent-type: text/plain\r\n\r\nx\r\n" + END,
        b"--line\r\n" + b"a: b\r\n" * 100 + b"\r\nx\r\n" + END,
        b"--line\r\na: " + b"b" * 100_000 + b"\r\n\r\nx\r\n" + END,
    ],
    ids=["none", "two files", "two fields", "long", "many", "no name", "headers", "long header"],
)
def test_another_form_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        read(body)


@pytest.mark.parametrize(
    "content_type", ["", "application/json", "multipart/form-data", f"{TYPE}{'x' * 100}"]
)
def test_a_body_that_is_no_form_is_refused(content_type: str) -> None:
    with pytest.raises(BadRequest, match="not a form"):
        FileForm(content_type, lambda _: None)
