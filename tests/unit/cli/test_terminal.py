"""Bytes of an engine on their way to a terminal."""

from __future__ import annotations

import re

import pytest

from gateway.cli.terminal import pour
from tests.support.paths import ROOT

LOG = "größe \x1b[31mred\x1b[0m\r\n".encode() + b"\x9b2J\xff\xc2\x9bK\n"


def test_a_log_is_shown_and_does_not_steer_wherever_its_pieces_are_cut(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    for cut in range(len(LOG)):
        pour([LOG[:cut], LOG[cut:]])
        shown = capfdbinary.readouterr().out.decode()
        assert shown == "größe \\x1b[31mred\\x1b[0m\\x0d\n\\x9b2J\\xff\\u009bK\n"
    pour([b"half a letter: \xe2\x82"])
    assert capfdbinary.readouterr().out == b"half a letter: \\xe2\\x82"


def test_raw_bytes_pass_where_they_are_asked_for(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    pour([LOG[:7], LOG[7:]], raw=True)
    assert capfdbinary.readouterr().out == LOG


def test_commands_have_no_other_way_to_the_terminal() -> None:
    ways = re.compile(r"\b(typer\.(secho|echo)|click\.|print\(|sys\.std(out|err)\b(?!\.isatty)|rich\b(?!_markup))")
    found = {
        f"{path.name}: {line.strip()}"
        for path in (ROOT / "gateway" / "cli").glob("*.py")
        for line in path.read_text().splitlines()
        if path.name != "terminal.py" and ways.search(line)
    }
    assert not found
