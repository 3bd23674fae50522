"""Options of engines on the command line."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from gateway.cli import foreign_options, options
from gateway.cli.main import app
from gateway.cli.registry import add_commands

add_commands(app)


def usage_error_of(arguments: list[str]) -> object:
    with pytest.raises(options.TYPO_ERROR) as error:
        CliRunner().invoke(app, arguments, standalone_mode=False, catch_exceptions=False)
    return error.value


@pytest.mark.parametrize(
    ("words", "translation"),
    [
        ("plan M --max-model-len 32k --tp 2", "plan M --context 32k --tp 2"),
        ("plan M --tensor-parallel-size=2", "plan M --tp 2"),
        ("plan M --kv-cache-dtype fp8 --tp 2", "plan M --arg kv-cache-dtype=fp8 --tp 2"),
        ("add m M --kv-cache-dtype=fp8", "add m M --arg kv-cache-dtype=fp8"),
        ("plan --enforce-eager M", "plan --arg enforce-eager M"),
        ("plan M --mem-fraction-static 0.8", "plan M --arg mem-fraction-static=0.8"),
    ],
)
def test_a_flag_of_an_engine_has_our_form(words: str, translation: str) -> None:
    result = foreign_options.translated_arguments(words.split(), usage_error_of(words.split()))
    assert result is not None
    assert result[0] == translation.split()


@pytest.mark.parametrize(
    "words",
    [
        "plan M --kv-cash-dtype fp8",  # a mistake
        "plan M --kv-cache-dtype",  # without its value
        "plan M --kv-cache-dtype --tp 2",
        "plan M --served-model-name a",  # the gateway has a way of its own
        "plan M --tp two",
        "ps --kv-cache-dtype fp8",  # starts no engine
    ],
)
def test_other_mistakes_are_no_flags(words: str) -> None:
    error = usage_error_of(words.split())
    assert foreign_options.translated_arguments(words.split(), error) is None
