"""Bytes of an engine on their way to a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import sys
import termios

import pytest

from gateway.cli.terminal import StreamedText, print_bytes, print_message
from gateway.cli.text_tables import print_table
from tests.support.paths import ROOT
from tests.support.versions import VLLM_REF

LOG = "größe \x1b[31mred\x1b[0m\r\n".encode() + b"\x9b2J\xff\xc2\x9bK\n"


def test_a_log_is_shown_and_does_not_steer_wherever_its_pieces_are_cut(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    for cut in range(len(LOG)):
        print_bytes([LOG[:cut], LOG[cut:]])
        text = capfdbinary.readouterr().out.decode()
        assert text == "größe \\x1b[31mred\\x1b[0m\\x0d\n\\x9b2J\\xff\\u009bK\n"
    print_bytes([b"half a letter: \xe2\x82"])
    assert capfdbinary.readouterr().out == b"half a letter: \\xe2\\x82"


def test_raw_bytes_pass_where_they_are_asked_for(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    print_bytes([LOG[:7], LOG[7:]], is_raw=True)
    assert capfdbinary.readouterr().out == LOG


@pytest.mark.parametrize("columns", [40, 80])
def test_a_terminal_gets_whole_words(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    words = (
        "The engine vllm==0.26.0 is not installed on this machine. Run `fitserve engine install"
        " vllm==0.26.0`.\nOr /a/path/that-is-longer-than-a-line-of-forty-columns/models"
    )
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, columns))
    monkeypatch.setenv("COLUMNS", str(columns))
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        print_message(words)
    text = os.read(master, 4096).decode()
    os.close(master)
    assert text.split() == words.split()
    assert all(len(line) <= columns or " " not in line for line in text.splitlines())


# Columns of `fitserve ps`: those that fit when their cells wrap, the last below, and those of which
# each row is a paragraph.
HEAD = ("NAME", "STATE", "ENGINE", "CONTEXT", "GPUS", "MEMORY", "UP", "LAST USE", "STAYS", "DETAIL")
NARROW = (
    "qwen",
    "ready",
    VLLM_REF,
    "4,096",
    "0,1",
    "2.3 GiB",
    "1m6s",
    "3m ago",
    "for ever",
    "",
)
LOST = (
    "dead",
    "unreachable",
    "-",
    "-",
    "-",
    "-",
    "-",
    "-",
    "-",
    "http://127.0.0.1:9 does not answer (Connection refused)",
)
WIDE = ("a-model-with-a-long-name", "ready 2/3", "sglang==0.5.10.post1", *NARROW[3:9], "no room")


@pytest.mark.parametrize(
    "rows", [[NARROW], [LOST], [NARROW, LOST], [WIDE], [WIDE, LOST], [NARROW[:9], WIDE[:9]]]
)
@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_a_table_cuts_and_loses_no_word(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rows: list[tuple[str, ...]],
    columns: int,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    print_table(HEAD[: len(rows[0])], rows)
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= columns
    words = {word.strip(":,") for word in output.split()}
    assert {word for row in rows for cell in row if cell != "-" for word in cell.split()} <= words


@pytest.mark.parametrize("row", [NARROW, LOST, WIDE])
def test_a_narrow_table_leaves_out_columns_before_it_breaks_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], row: tuple[str, ...]
) -> None:
    optional = ("UP", "LAST USE", "STAYS", "CONTEXT", "MEMORY", "GPUS")
    monkeypatch.setenv("COLUMNS", "80")
    print_table(HEAD, [row], optional=optional)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    titles, line = lines[0], lines[1]
    left_out = [name for name in optional if name not in titles]
    assert left_out == [*optional[: len(left_out)]]
    cells = dict(zip(HEAD, row, strict=True))
    assert all(cell in line for name, cell in cells.items() if name not in (*left_out, "DETAIL"))
    assert cells["DETAIL"] in "".join(lines[1:])
    monkeypatch.setenv("COLUMNS", "200")
    print_table(HEAD, [row], optional=optional)
    wide = capsys.readouterr().out
    assert all(name in wide for name in HEAD)


def read(descriptor: int) -> str:
    """All that was written to the terminal's other side."""
    output = b""
    while select.select([descriptor], [], [], 0)[0]:
        output += os.read(descriptor, 4096)
    os.close(descriptor)
    return output.decode()


@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_an_answer_in_pieces_has_whole_words_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    words = (
        "An answer of some words, as a model writes \x1b[31mit, then"
        " aWordThatIsLongerThanALineOfTwentyOneColumns.\nAnd"
        " \u4f60\u597d\u4f60\u597d\u4f60\u597d\u4f60\u597d\u4f60\u597d."
    )
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 21))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "21")
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        flow = StreamedText()
        for start in range(0, len(words), cut):
            flow.write(words[start : start + cut])
        flow.write("Hm.", is_dim=True)
        flow.finish()
        output = read(master)
    assert output.count("\x1b[2m") == 1
    # The columns that were taken back: so many to the left, and the rest of the line cleared.
    plain = re.sub(r"\x1b\[[02]m", "", output)
    while jump := re.search(r"\x1b\[(\d+)D\x1b\[K", plain):
        plain = plain[: jump.start() - int(jump[1])] + plain[jump.end() :]
    lines = plain.replace("\r", "").splitlines()
    assert max(sum(1 + (char >= "\u2e80") for char in line) for line in lines) <= 20
    assert "".join(lines).replace(" ", "") == (words.replace("\x1b", "\\x1b") + "Hm.").replace(
        " ", ""
    ).replace("\n", "")
    assert [line.rstrip() for line in lines[:3]] == [
        "An answer of some",
        "words, as a model",
        "writes \\x1b[31mit,",
    ]


def test_output_outside_a_terminal_has_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    print_message("word " * 40)
    assert capsys.readouterr().err == "word " * 40 + "\n"


def test_commands_have_no_other_way_to_the_terminal() -> None:
    ways = re.compile(
        r"\b(typer\.(secho|echo)|click\.|print\(|sys\.std(out|err)\b(?!\.isatty)|rich\b(?!_markup))"
    )
    lines = {
        f"{path.name}: {line.strip()}"
        for path in (ROOT / "gateway" / "cli").rglob("*.py")
        for line in path.read_text().splitlines()
        if path.name != "terminal.py" and ways.search(line)
    }
    assert not lines
