"""Every command in README.md and docs/ is one that the program takes, and every command that a
message names is there."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.support.documented import (
    Shown,
    commands,
    commands_of_block,
    mentioned_commands,
    parse,
    program,
    unknown_word,
)
from tests.support.paths import MODELS, ROOT
from tests.support.program import app


@pytest.mark.parametrize("one", commands_of_block(), ids=str)
def test_what_is_shown_is_taken(one: Shown) -> None:
    # An option that prints and ends, such as `--hardware list`.
    with contextlib.suppress(typer.Exit):
        parse(one.words)


def test_what_is_mentioned_is_there() -> None:
    wrong = {
        f"{command}: there is no {word}"
        for command in mentioned_commands()
        if (word := unknown_word(command.words)) is not None
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_every_command_is_shown() -> None:
    words = {
        one.words[0] if one.words[0][0] != "-" else one.words[2] for one in commands_of_block()
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
def test_what_is_not_there_is_found(words: tuple[str, ...]) -> None:
    assert unknown_word(words) is not None
    with pytest.raises(Exception, match="No such"):
        parse(words)


def test_the_plan_in_the_readme_is_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    shutil.copy(MODELS / "qwen3-8b.json", folder / "config.json")
    monkeypatch.setenv("FITSERVE_DATA_DIR", str(tmp_path / "data"))
    block = (ROOT / "README.md").read_text().partition("$ fitserve plan ")[2].partition("```")[0]
    command, *lines = block.splitlines()
    source, *options = command.split()
    assert program()
    done = CliRunner().invoke(app, ["plan", str(folder), *options])
    assert done.exit_code == 0
    printed = done.output.replace(str(folder), source).splitlines()
    assert len(lines) > 5
    assert [line for line in lines if line not in printed] == []
