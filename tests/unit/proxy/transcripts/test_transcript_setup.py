"""Setups of transcripts: the keys and models that they cover."""

from __future__ import annotations

from dataclasses import replace

from gateway.proxy.access.auth import Key
from gateway.proxy.transcripts.transcript_setup import TranscriptSetup

PLAIN_KEY = Key("app", b"digest", frozenset({"inference"}))


def test_a_setup_covers_recorded_keys_and_models_only() -> None:
    setup = TranscriptSetup("socket", frozenset({"m"}))
    assert setup.covers(PLAIN_KEY, "m")
    assert not setup.covers(PLAIN_KEY, "other")
    assert not setup.covers(PLAIN_KEY, "")
    assert setup.covers(replace(PLAIN_KEY, is_recorded=True), "other")


def test_a_star_covers_every_model() -> None:
    assert TranscriptSetup("socket", frozenset({"*"})).covers(PLAIN_KEY, "other")
