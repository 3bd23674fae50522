"""The growing results of a batch: a line for each answer, appended and never changed.

The id of a result has the number of its line. So the file itself says which lines are answered, and
nothing else has to agree with it after a crash. An incomplete last line is cut off.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gateway.decoding import DECODE_ERRORS

_DIGITS = 8
_LINES_AT_ONCE = 200
_START = b'{"id":"'
_LINE_BREAKS = re.compile(rb"[\r\n]+")


def result_id(batch_id: str, number: int) -> str:
    """The id of the result of a line."""
    return f"batch_req_{batch_id.removeprefix('batch_')}{number:0{_DIGITS}x}"


def plain_json(body: bytes) -> bytes | None:
    """The body on one line, as it is otherwise; None: it is not JSON."""
    try:
        body.decode()  # msgspec leaves values raw and does not check their UTF-8
        msgspec.json.decode(body, type=msgspec.Raw)
    except DECODE_ERRORS:
        return None
    # A line break in JSON stands between values alone, where a blank means the same.
    return _LINE_BREAKS.sub(b" ", body).strip() or None


def answer_result(id_: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """The result of a line that was answered. body: of `plain_json`."""
    return b'%b%b","custom_id":%b,"response":{"status_code":%d,"request_id":%b,"body":%b},%b\n' % (
        _START,
        id_.encode(),
        json.dumps(custom_id).encode(),
        status,
        json.dumps(request_id).encode(),
        body,
        b'"error":null}',
    )


def failure_result(id_: str, custom_id: str, code: str, message: str) -> bytes:
    """The result of a line that no engine answered."""
    error = json.dumps({"code": code, "message": message}).encode()
    return b'%b%b","custom_id":%b,"response":null,"error":%b}\n' % (
        _START,
        id_.encode(),
        json.dumps(custom_id).encode(),
        error,
    )


class ResultFile:
    """One of the two result files of a batch. Its methods block for disk writes."""

    def __init__(self, path: Path, batch_id: str) -> None:
        self.path = path
        self.size = 0
        self._prefix = _START + result_id(batch_id, 0)[:-_DIGITS].encode()
        self._descriptor = -1

    def open(self, answered_marks: bytearray) -> int:
        """Open or create the file, and mark the lines that have results. The number of results.
        Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        count = self._read(answered_marks)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o600)
        os.ftruncate(self._descriptor, self.size)
        os.fsync(self._descriptor)
        return count

    def _read(self, answered_marks: bytearray) -> int:
        """Mark the lines with results, as far as the file is whole; all behind that is to be cut
        off. A power cut can leave anything behind the last bytes that were written for certain."""
        count = self.size = 0
        if not self.path.exists():
            return 0
        with self.path.open("rb") as file:
            while line := file.readline():
                number = self._number(line)
                if not 0 <= number < len(answered_marks):
                    break
                answered_marks[number] = 1
                count += 1
                self.size += len(line)
                if count % _LINES_AT_ONCE == 0:
                    time.sleep(0)  # the event loop takes its turn
        return count

    def _number(self, line: bytes) -> int:
        """The number of a result's line; -1 where the result is not whole."""
        digits = line[len(self._prefix) : len(self._prefix) + _DIGITS]
        if not (line.startswith(self._prefix) and line.endswith(b"}\n")):
            return -1
        try:
            return int(digits, 16)
        except ValueError:
            return -1

    def append(self, lines: Sequence[bytes]) -> None:
        """Append results, which are on the disk then. Raises OSError, and then none is."""
        try:
            for line in lines:
                self._write(line)
            os.fdatasync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, self.size)
            raise
        self.size += sum(len(line) for line in lines)

    def _write(self, line: bytes) -> None:
        view = memoryview(line)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
