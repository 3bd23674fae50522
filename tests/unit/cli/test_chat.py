"""The speed of an answer in a conversation, whatever an engine counts."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.cli.chat import _AnswerClock


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 1}, True),
        ({}, False),
        ({"prompt_tokens": 3}, False),
        ({"prompt_tokens": "3", "completion_tokens": "many"}, False),
        ({"prompt_tokens": [], "completion_tokens": {}}, False),
    ],
)
def test_tokens_are_shown_where_the_engine_counts_them(
    usage: dict[str, Any], counted: bool
) -> None:
    clock = _AnswerClock()
    assert clock.speed_text(usage) == "There was no answer."
    clock.record_piece()
    words = clock.speed_text(usage)
    assert ("prompt of 3 tokens, answer of 1 token" in words) == counted
    assert words.startswith("first token after ")
