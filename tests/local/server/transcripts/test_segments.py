"""Files of transcripts on a real disk: bounds of size and age, and lines that were cut off."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from gateway.server.transcripts.segments import (
    SegmentWriter,
    list_segments,
    read_line,
    read_lines,
)

MIB = 1024 * 1024


class SetClock:
    """Unix time that a test sets."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def time(self) -> float:
        return self.now


def tokens(folder: Path) -> list[bytes]:
    return [line.token for segment in list_segments(folder) for line in read_lines(segment)]


def test_lines_are_read_back_by_their_place(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path / "t", MIB, 3600)
    for token in (b"one", b"two", b"three"):
        writer.append(token)
    (segment,) = list_segments(tmp_path / "t")
    lines = read_lines(segment)
    assert [line.token for line in lines] == [b"one", b"two", b"three"]
    assert [read_line(tmp_path / "t", segment.name, line.offset) for line in lines] == [
        b"one",
        b"two",
        b"three",
    ]
    assert read_line(tmp_path / "t", segment.name, 1) is None
    assert read_line(tmp_path / "t", "../" + segment.name, 0) is None
    assert segment.path.stat().st_mode & 0o777 == 0o600


def test_the_oldest_files_are_deleted_beyond_the_size(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, MIB, 3600)
    for number in range(200):
        writer.append(b"%06d" % number + b"x" * 10_000)
        assert sum(segment.size for segment in list_segments(tmp_path)) <= MIB
    numbers = [int(token[:6]) for token in tokens(tmp_path)]
    assert numbers == list(range(numbers[0], 200))
    assert len(numbers) > 80


def test_files_are_deleted_when_their_first_line_is_too_old(tmp_path: Path) -> None:
    clock = SetClock()
    writer = SegmentWriter(tmp_path, MIB, 2400, now=clock.time)
    begin = clock.time()
    for number in range(30):
        writer.append(b"%d" % number)
        clock.now += 200
        writer.sweep()
        ages = [clock.time() - segment.started_at for segment in list_segments(tmp_path)]
        assert all(age < 2400 for age in ages)
    assert clock.time() - begin == 6000
    assert len(tokens(tmp_path)) >= 10
    clock.now += 2400
    writer.sweep()
    assert tokens(tmp_path) == []
    writer.append(b"last")
    assert tokens(tmp_path) == [b"last"]


def test_a_line_that_was_cut_off_is_not_read_and_hides_no_other(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, MIB, 3600)
    writer.append(b"whole")
    (segment,) = list_segments(tmp_path)
    with segment.path.open("ab") as file:
        file.write(b"hal")
    assert tokens(tmp_path) == [b"whole"]
    writer.close()
    writer.append(b"next")
    assert tokens(tmp_path) == [b"whole", b"next"]


def test_a_refused_write_leaves_no_part_of_its_line(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, MIB, 3600)
    writer.append(b"whole")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            writer.append(b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert tokens(tmp_path) == [b"whole"]
    writer.append(b"next")
    assert tokens(tmp_path) == [b"whole", b"next"]
