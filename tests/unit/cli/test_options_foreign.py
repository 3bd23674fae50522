"""Options and commands of other programs: the command line names the ones of fitserve."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from gateway.cli import options
from gateway.cli.main import app
from gateway.cli.registry import add_commands

add_commands(app)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("add m SOURCE --max-model-len 32k", "Write --context 32k."),
        ("plan SOURCE --tensor-parallel-size 2", "Write --tp 2."),
        (
            "add m SOURCE --ttl 300",
            "Write --keep-alive 300s. The 0 of llama-swap is --keep-alive -1.",
        ),
        (
            "add m SOURCE --max-num-batched-tokens 8192",
            "A flag of the engine is written --arg max-num-batched-tokens=VALUE.",
        ),
        ("serve SOURCE", "`fitserve add NAME MODEL` a model in it."),
        ("serve --model SOURCE", "`fitserve add NAME MODEL` a model in it."),
    ],
)
def test_an_option_of_another_program_names_ours(words: str, hint: str) -> None:
    with pytest.raises(options.TYPO_ERROR) as error:
        CliRunner().invoke(app, words.split(), standalone_mode=False, catch_exceptions=False)
    assert options.mistyped_message(error.value).endswith(hint)
