"""Commands in README.md and docs/ are accepted by the program, and commands that messages name
exist."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import typer
from typer.testing import CliRunner

from tests.support.documented import (
    PAGES,
    ShownCommand,
    commands,
    commands_of_block,
    mentioned_commands,
    parse,
    program,
    unknown_word,
)
from tests.support.paths import MODELS, ROOT
from tests.support.program import app


@pytest.mark.parametrize("command", commands_of_block(), ids=str)
def test_a_shown_command_is_taken(command: ShownCommand) -> None:
    # An option that prints and ends, such as `--hardware list`.
    with contextlib.suppress(typer.Exit):
        parse(command.words)


def test_each_mentioned_command_exists() -> None:
    wrong = {
        f"{command}: there is no {word}"
        for command in mentioned_commands()
        if (word := unknown_word(command.words)) is not None
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_every_command_is_shown() -> None:
    words = {
        each_command.words[0] if each_command.words[0][0] != "-" else each_command.words[2]
        for each_command in commands_of_block()
    }
    mentions = {
        command.words[0]
        for command in mentioned_commands()
        if command.words and not command.page.startswith(("gateway/", "profiles/"))
    }
    assert set(program().commands) - words - mentions == set()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fitserve ps | show NAME | rm NAME", [("ps",), ("show", "NAME"), ("rm", "NAME")]),
        ("fitserve stop m; fitserve start m    # words", [("stop", "m"), ("start", "m")]),
        (
            "fitserve plan M [--tp N] [--hardware NAME|FILE]",
            [
                ("plan", "M", "--tp", "8", "--hardware", "NAME"),
                ("plan", "M", "--tp", "8", "--hardware", "FILE"),
            ],
        ),
        ("fitserve probe --json > a.json", [("probe", "--json")]),
        ("fitserve retry[[ {model}]]", [("retry", "X")]),
    ],
)
def test_a_line_is_read(text: str, words: list[tuple[str, ...]]) -> None:
    assert list(commands(text)) == words


@pytest.mark.parametrize(
    "words",
    [
        ("nothing",),
        ("add", "m", "--sorce", "x"),
        ("engine", "nothing"),
        ("set", "m", "--tensor-parallel", "2"),
    ],
)
def test_a_missing_command_is_noticed(words: tuple[str, ...]) -> None:
    assert unknown_word(words) is not None
    with pytest.raises(Exception, match="No such"):
        parse(words)


SOURCE = "/srv/models/Qwen3-8B"


def blocks_with_output() -> list[str]:
    """The blocks of pages that show a command without a gateway, with its output."""
    return [
        block.partition("```")[0]
        for page in PAGES
        for block in page.read_text().split("```text\n$ fitserve ")[1:]
    ]


def is_printed(line: str, output: list[str]) -> bool:
    """Whether a command printed this line, of which the page may have cut the end."""
    if line.endswith("..."):
        return any(text.startswith(line.removesuffix("...")) for text in output)
    return line in output


@pytest.mark.parametrize("block", blocks_with_output(), ids=lambda block: block.splitlines()[0])
def test_the_output_in_a_page_equals_that_of_the_command(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    # About as long as SOURCE, so that lines wrap at the same words.
    parent = TemporaryDirectory(dir="/tmp")
    request.addfinalizer(parent.cleanup)
    folder = Path(parent.name) / "Qwen3-8B"
    folder.mkdir()
    shutil.copy(MODELS / "qwen3-8b.json", folder / "config.json")
    monkeypatch.setenv("FITSERVE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.chdir(ROOT)
    command, *lines = block.splitlines()
    assert program()
    assert len(lines) > 5
    lines_not_printed = []
    # Whole lines as in a pipe, or lines as wide as a page.
    for columns in ("", "100"):
        monkeypatch.setenv("COLUMNS", columns)
        result = CliRunner().invoke(app, command.replace(SOURCE, str(folder)).split())
        # 1: the log shows a failure.
        assert result.exit_code == (1 if command.startswith("diagnose ") else 0)
        output = result.output.replace(str(folder), SOURCE).splitlines()
        lines_not_printed.append([line for line in lines if not is_printed(line, output)])
    assert [] in lines_not_printed


def test_pages_show_outputs() -> None:
    assert len(blocks_with_output()) >= 4
