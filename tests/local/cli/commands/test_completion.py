"""`fitserve completion`: the shells themselves complete with the printed scripts."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

import pytest

from tests.support.commands import fitserve


@cache
def print_output(shell: str) -> str:
    result = fitserve("completion", shell)
    assert result.returncode == 0, result.stderr
    return result.stdout


# The typed words, the completed one last, and some of its completions.
TYPED = [
    (("fitserve", "re"), {"restore", "retry"}),
    (("fitserve", "engine", "in"), {"install"}),
    (("fitserve", "export", "m", "--form"), {"--format"}),
    (("fitserve", "export", "m", "--format", ""), {"argv", "compose", "kubernetes"}),
    (("fitserve", "set", "m", "--conc"), {"--concurrency"}),
    (("fitserve", "keys", "add", "x", "--max"), {"--max-in-flight"}),
    (("fitserve", "--ho"), {"--host"}),
]


@pytest.mark.parametrize(("words", "completions"), TYPED)
def test_bash_completes_commands_and_models(words: tuple[str, ...], completions: set[str]) -> None:
    line = " ".join(f"'{word}'" for word in words)
    text = (
        f"{print_output('bash')}\nCOMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1));"
        ' _fitserve; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    result = subprocess.run(["bash", "-u", "-c", text], capture_output=True, text=True, check=True)
    assert set(result.stdout.split()) == completions
    assert result.stderr == ""


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_accept_the_printed_script(shell: str) -> None:
    assert "kubernetes" in print_output(shell)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not here")
    subprocess.run([shell, "-n"], input=print_output(shell), text=True, check=True)


def test_an_unknown_shell_is_reported() -> None:
    result = fitserve("completion", "tcsh")
    assert result.returncode == 2
    assert "bash" in result.stderr
