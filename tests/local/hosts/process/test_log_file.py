"""Engine logs: bounded memory whatever is written, and trimming under a reader's and a writer's
hands."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import BinaryIO

import pytest

from gateway.hosts.host import MAX_LINE
from gateway.hosts.process import log_file as logfile
from gateway.hosts.process.log_file import CHUNK, LogFileReader, trim


def drain(reader: LogFileReader) -> list[bytes]:
    lines = []
    while reader.has_more():
        lines += reader.read()
    return lines


def test_lines_are_whole_even_when_they_were_written_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("ab", buffering=0) as engine, LogFileReader(path) as reader:
        engine.write(b"one\ntw")
        assert drain(reader) == [b"one"]
        assert reader.partial == b"tw"
        engine.write(b"o\n\nthree")
        assert drain(reader) == [b"two", b""]
        assert reader.partial == b"three"


def test_a_line_that_never_ends_takes_no_more_memory_than_the_longest_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (10 * CHUNK) + b"\nshort\n" + b"y" * (2 * CHUNK))
    with LogFileReader(path) as reader:
        lines = []
        while reader.has_more():
            lines += reader.read()
            assert len(reader.partial) <= MAX_LINE
        assert lines == [b"x" * MAX_LINE, b"short"]
        assert reader.partial == b"y" * MAX_LINE


def test_one_read_takes_one_chunk_however_much_there_is(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"0123456789abcdef\n" * CHUNK)
    with LogFileReader(path) as reader:
        assert sum(len(line) + 1 for line in reader.read()) <= CHUNK
        assert reader.has_more()


def test_a_missing_log_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LogFileReader(tmp_path / "log")
    assert not trim(tmp_path / "log")


def test_a_small_log_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 1000)
    assert not trim(path)
    assert path.stat().st_size == 1000
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logfile, "LIMIT", 1000)
    monkeypatch.setattr(logfile, "KEEP", 100)


@pytest.mark.usefixtures("small_limit")
def test_a_trimmed_log_keeps_its_beginning_and_its_readers(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("ab", buffering=0) as engine, LogFileReader(path) as reader:
        engine.write(b"first\n" + b"x" * 2000 + b"\nlast\n")
        assert drain(reader) == [b"first", b"x" * 2000, b"last"]
        assert trim(path)
        assert path.stat().st_size == 100
        assert path.with_name("log.1").read_bytes() == b"x" * 994 + b"\nlast\n"
        engine.write(b"new\n")
        assert drain(reader) == [b"new"]
        assert path.read_bytes() == b"first\n" + b"x" * 94 + b"new\n"


@pytest.mark.usefixtures("small_limit")
def test_a_reader_at_the_beginning_loses_no_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("ab", buffering=0) as engine, LogFileReader(path) as reader:
        engine.write(b"first\n" * 400)
        assert trim(path)
        engine.write(b"\nnew\n")
        assert drain(reader) == [b"first"] * 16 + [b"firs", b"new"]


@pytest.mark.usefixtures("small_limit")
def test_a_log_is_cut_even_when_no_copy_can_be_made(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 2000)
    path.with_name("log.1").mkdir()
    assert trim(path)
    assert path.stat().st_size == 100


@pytest.mark.usefixtures("small_limit")
def test_half_a_copy_does_not_go_on_filling_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_source: BinaryIO, target: BinaryIO) -> None:
        target.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    path = tmp_path / "log"
    path.write_bytes(b"x" * 2000)
    assert trim(path)
    assert path.stat().st_size == 100
    assert list(tmp_path.iterdir()) == [path]
