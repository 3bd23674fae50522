"""What an inquiry says, in whatever pieces, within limits."""

from __future__ import annotations

import pytest

from gateway.engines.inquiry.spoken import Spoken
from gateway.errors import HostError


def test_lines_are_whole_in_whatever_pieces_they_come() -> None:
    spoken = Spoken()
    text = b'{"question": 0}\n\n{"done": true}\nrest'
    assert [line for at in range(len(text)) for line in spoken.answered(text[at : at + 1])] == [
        *text.split(b"\n")[:-1]
    ]
    assert [*Spoken().answered(text)] == [*text.split(b"\n")[:-1]]


def test_a_line_and_all_together_have_an_end() -> None:
    with pytest.raises(HostError, match="endless line"):
        [*Spoken(most_line=10).answered(b"x" * 11)]
    assert [*Spoken(most_bytes=10).answered(b"x" * 9 + b"\n")] == [b"x" * 9]
    spoken = Spoken(most_bytes=10)
    spoken.muttered(b"x" * 6)
    with pytest.raises(HostError, match="no end"):
        [*spoken.answered(b"x" * 5)]


def test_a_failure_is_told_in_the_last_words() -> None:
    spoken = Spoken()
    assert "it said nothing" in spoken.failure(1).message
    spoken.muttered(b"Traceback\n  File x\nImportError: no such thing\n\n")
    assert (
        spoken.failure(1).message
        == "The engine could not be asked (exit code 1): ImportError: no such thing."
    )
    spoken.muttered(b"without an end" + b"!" * 10_000)
    assert spoken.failure(1).message.count("!") == 300
    for code in (137, -9):
        assert "wanted more than 8 GiB of memory" in spoken.failure(code).message
