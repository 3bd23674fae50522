"""Command lines that are wrong, at a terminal of 80 columns: two sentences in whole words, and the
exit code of usage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.typing_terminal import TypingTerminal


@pytest.mark.parametrize(
    ("words", "code", "words_of_error"),
    [
        (["pss"], 2, "Did you mean 'ps'?"),
        (["set", "m", "--contxt", "5"], 2, "--min-context"),
        (["export", "m", "--format", "nope"], 2, "'nope' is not one of 'argv'"),
        (["serve", "--port", "abc"], 2, "must be a whole number"),
        (["add", "m", "./a", "--wait", "--timeout", "abc"], 2, "a duration looks like"),
        (["plan", "./a.gguf"], 1, "There is no folder ./a.gguf"),
        (["add"], 2, "Missing argument"),
        (["add", "m", "./a", "--ttl", "300"], 2, "Write --keep-alive 300s."),
        (["keys", "add", "one", "--scope", "foo"], 2, "There is no scope foo"),
        (["--port", "1", "ps"], 3, "Connection refused"),
        (["--host", "a/b", "ps"], 2, "is not the address of a gateway"),
        (["-v"], 2, "`fitserve --version` prints the version."),
        (["plan", "/nowhere", "--for", "thruput"], 2, "--for takes 'balanced'"),
        (
            ["plan", "/nowhere", "--kv-cache-dtype", "fp8"],
            1,
            "is read as --arg kv-cache-dtype=VALUE",
        ),
        (["plan", "/nowhere", "--enforce-eager"], 1, "is read as --arg enforce-eager."),
        (["plan", "/nowhere"], 1, "There is no folder /nowhere"),
        (["plan", "/nowhere", "--hardware", "2x309"], 1, "did you mean 2x3090?"),
        (["restore", "/nowhere"], 2, "/nowhere cannot be read"),
        (["config", "check", "/nowhere"], 2, "cannot be read"),
        (["diagnose", "/nowhere"], 2, "cannot be read"),
        (["engine", "rm", "nope"], 1, "is not installed here"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistyped_option_is_reported_in_whole_words(
    tmp_path: Path, words: list[str], code: int, words_of_error: str
) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    (tmp_path / "data/fitserve.db").touch(mode=0o600)
    with TypingTerminal(
        *words, FITSERVE_DATA_DIR=str(tmp_path / "data"), FITSERVE_PORT="1"
    ) as terminal:
        assert terminal.wait_for_exit() == code
        lines = terminal.output.replace("\r\n", "\n").split("\n")
    assert words_of_error in " ".join(line.strip() for line in lines)
    assert "Traceback" not in terminal.output
    assert max(map(len, lines)) <= 80
    assert "python -m" not in terminal.output


def test_a_backup_is_looked_at_before_anything_is_asked(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    (tmp_path / "data/fitserve.db").touch(mode=0o600)
    (tmp_path / "no.tar.gz").write_text("nothing")
    with TypingTerminal(
        "restore", str(tmp_path / "no.tar.gz"), FITSERVE_DATA_DIR=str(tmp_path / "data")
    ) as terminal:
        assert terminal.wait_for_exit() == 2
    assert "is not a complete backup" in " ".join(terminal.output.split())
    assert "[y/N]" not in terminal.output
