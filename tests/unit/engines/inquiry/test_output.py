"""The output of an inquiry, in any pieces, within limits."""

from __future__ import annotations

import pytest

from gateway.engines.inquiry.output import InquiryOutput
from gateway.errors import HostError


def test_lines_are_whole_in_pieces_of_any_size() -> None:
    output = InquiryOutput()
    text = b'{"question": 0}\n\n{"done": true}\nrest'
    assert [line for at in range(len(text)) for line in output.add_output(text[at : at + 1])] == [
        *text.split(b"\n")[:-1]
    ]
    assert [*InquiryOutput().add_output(text)] == [*text.split(b"\n")[:-1]]


def test_a_line_and_all_together_have_an_end() -> None:
    with pytest.raises(HostError, match="a line without an end"):
        [*InquiryOutput(most_line=10).add_output(b"x" * 11)]
    assert [*InquiryOutput(most_bytes=10).add_output(b"x" * 9 + b"\n")] == [b"x" * 9]
    output = InquiryOutput(most_bytes=10)
    output.add_error_output(b"x" * 6)
    with pytest.raises(HostError, match="is too long"):
        [*output.add_output(b"x" * 5)]


def test_a_failed_inquiry_reports_its_last_lines() -> None:
    output = InquiryOutput()
    assert "it printed nothing" in output.exit_error(1).message
    output.add_error_output(b"Traceback\n  File x\nImportError: no such thing\n\n")
    assert (
        output.exit_error(1).message
        == "The engine's code could not be run (exit code 1): ImportError: no such thing."
    )
    output.add_error_output(b"without an end" + b"!" * 10_000)
    assert output.exit_error(1).message.count("!") == 300
    for code in (137, -9):
        assert "wanted more than 8 GiB of memory" in output.exit_error(code).message
