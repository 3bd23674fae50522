"""Bytes of an engine on their way to a terminal."""

from __future__ import annotations

import os
import pty
import re
import sys
import termios

import pytest

from gateway.cli.terminal import pour, told
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


@pytest.mark.parametrize("columns", [40, 80])
def test_a_terminal_gets_whole_words(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    words = "The engine vllm==0.26.0 is not installed on this machine. Run `fitserve engine install vllm==0.26.0`.\nOr /a/path/that-is-longer-than-a-line-of-forty-columns/models"
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    monkeypatch.setenv("COLUMNS", str(columns))
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        told(words)
    said = os.read(ours, 4096).decode()
    os.close(ours)
    assert said.split() == words.split()
    assert all(len(line) <= columns or " " not in line for line in said.splitlines())


def test_what_is_no_terminal_gets_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    told("word " * 40)
    assert capsys.readouterr().err == "word " * 40 + "\n"


def test_commands_have_no_other_way_to_the_terminal() -> None:
    ways = re.compile(r"\b(typer\.(secho|echo)|click\.|print\(|sys\.std(out|err)\b(?!\.isatty)|rich\b(?!_markup))")
    found = {
        f"{path.name}: {line.strip()}"
        for path in (ROOT / "gateway" / "cli").glob("*.py")
        for line in path.read_text().splitlines()
        if path.name != "terminal.py" and ways.search(line)
    }
    assert not found
