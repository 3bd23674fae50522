"""Result files of batches: the lines that they answer, also after a crash at any byte."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from gateway.server.batches.result_file import (
    ResultFile,
    answer_result,
    failure_result,
    plain_json,
    result_id,
)

BATCH = "batch_" + "0a" * 12
TOTAL = 20


def result(number: int) -> bytes:
    return answer_result(result_id(BATCH, number), f"c{number}", 200, "r", b'{"n": %d}' % number)


def open_file(path: Path) -> tuple[ResultFile, list[int], int]:
    """The file, and the lines that it answers."""
    marks = bytearray(TOTAL)
    file = ResultFile(path, BATCH)
    count = file.open(marks)
    return file, [number for number, mark in enumerate(marks) if mark], count


def test_results_are_lines_of_json() -> None:
    body = plain_json(b'{"a":\r\n [1]}\n')
    assert body is not None
    answer = answer_result("batch_req_1", 'a"é\n', 200, "r-1", body)
    assert answer.count(b"\n") == 1
    assert json.loads(answer) == {
        "id": "batch_req_1",
        "custom_id": 'a"é\n',
        "response": {"status_code": 200, "request_id": "r-1", "body": {"a": [1]}},
        "error": None,
    }
    failure = failure_result("batch_req_2", "b", "batch_expired", "The end.")
    assert failure.count(b"\n") == 1
    assert json.loads(failure) == {
        "id": "batch_req_2",
        "custom_id": "b",
        "response": None,
        "error": {"code": "batch_expired", "message": "The end."},
    }


@pytest.mark.parametrize(
    "body", [b"", b" \n", b"words", b'{"a": 1', b'{"a": 1}x', b'{"a": "\xff"}', b'{"a": "\n"}']
)
def test_a_body_that_is_no_json_is_found(body: bytes) -> None:
    assert plain_json(body) is None


def test_numbers_and_blanks_of_a_body_stay_as_they_are() -> None:
    assert plain_json(b'{"a":  1.10, "b": 1e400}') == b'{"a":  1.10, "b": 1e400}'


def test_a_file_says_which_lines_are_answered(tmp_path: Path) -> None:
    file, numbers, _ = open_file(tmp_path / "results")
    assert numbers == []
    file.append([result(3), result(0)])
    file.append([result(17)])
    file.close()
    file, numbers, count = open_file(tmp_path / "results")
    file.close()
    assert (numbers, count) == ([0, 3, 17], 3)


def test_a_file_cut_at_any_byte_has_whole_lines_alone(tmp_path: Path) -> None:
    texts = [result(5), result(6)]
    whole = b"".join(texts)
    for size in range(len(whole) + 1):
        path = tmp_path / f"results-{size}"
        path.write_bytes(whole[:size])
        file, numbers, _ = open_file(path)
        assert numbers == [5, 6][: (size >= len(texts[0])) + (size == len(whole))]
        file.append([result(7)])
        file.close()
        _, numbers_after, _ = open_file(path)
        assert numbers_after == [*numbers, 7]


@pytest.mark.parametrize(
    "rest", [b"\0" * 4096, b"\n", b"words\n", result(TOTAL), result(1).replace(b"0a", b"0b")]
)
def test_bytes_of_a_power_cut_are_cut_off(rest: bytes, tmp_path: Path) -> None:
    path = tmp_path / "results"
    path.write_bytes(result(2) + rest + result(4))
    file, numbers, _ = open_file(path)
    file.close()
    assert numbers == [2]
    assert path.read_bytes() == result(2)


def test_a_full_disk_leaves_no_part_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results"
    file, _, _ = open_file(path)
    file.append([result(1)])
    write = os.write

    def write_half(descriptor: int, data: memoryview) -> int:
        if len(data) < 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_half)
        with pytest.raises(OSError, match="No space"):
            file.append([result(2), result(3)])
    assert path.read_bytes() == result(1)
    file.append([result(2), result(3)])
    file.close()
    assert path.read_bytes() == result(1) + result(2) + result(3)
