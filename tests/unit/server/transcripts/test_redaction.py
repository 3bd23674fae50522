"""Rules of redaction: matches, defaults, and the bound of time."""

from __future__ import annotations

import signal

import pytest

from gateway.server.transcripts.redaction import MARK, RedactionTimeoutError, Redactor
from gateway.settings import Settings

SECRET = "sk-abcdefghijklmnop0123"


def test_matches_are_removed_from_texts_names_and_nested_values() -> None:
    redactor = Redactor("[0-9]{4}-[0-9]{4}\n\nname: \\w+")
    value = {"1234-5678": ["card 1234-5678", {"a": "name: Ada"}], "count": 3, "none": None}
    assert redactor.redact(value) == {
        MARK: [f"card {MARK}", {"a": MARK}],
        "count": 3,
        "none": None,
    }


def test_the_default_rules_remove_api_keys() -> None:
    redactor = Redactor(Settings.model_fields["transcript_redact"].default)
    assert redactor.redact(f"use {SECRET} or fs-{'x' * 43}, please") == (
        f"use {MARK} or {MARK}, please"
    )
    assert redactor.redact("a task-force of 3") == "a task-force of 3"


def test_a_rule_that_backtracks_for_ever_is_ended() -> None:
    former_handler = signal.getsignal(signal.SIGALRM)
    with pytest.raises(RedactionTimeoutError):
        Redactor("(a+)+$").redact("a" * 64 + "b")
    assert signal.getsignal(signal.SIGALRM) is former_handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_many_slow_texts_share_one_bound() -> None:
    with pytest.raises(RedactionTimeoutError):
        Redactor("(a|aa)+$").redact(["a" * 24 + "b"] * 100_000)
