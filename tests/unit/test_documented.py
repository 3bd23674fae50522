"""Every command in README.md and docs/ is one that the program takes, and every command that a
message names is there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.documented import Shown, commands, mentioned, parsed, program, shown, unknown
from tests.support.paths import MODELS, ROOT
from tests.support.program import app


@pytest.mark.parametrize("one", shown(), ids=str)
def test_what_is_shown_is_taken(one: Shown) -> None:
    parsed(one.words)


def test_what_is_mentioned_is_there() -> None:
    wrong = {
        f"{one}: there is no {word}"
        for one in mentioned()
        if (word := unknown(one.words)) is not None
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_every_command_is_shown() -> None:
    words = {one.words[0] if one.words[0][0] != "-" else one.words[2] for one in shown()}
    mentions = {
        one.words[0]
        for one in mentioned()
        if one.words and not one.page.startswith(("gateway/", "profiles/"))
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
    assert unknown(words) is not None
    with pytest.raises(Exception, match="No such"):
        parsed(words)


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
