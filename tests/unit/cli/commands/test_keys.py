"""`fitserve keys`."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.cli.commands import keys


def test_a_key_for_a_model_that_is_not_here_is_noted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wish = {"name": "tiny", "aliases": ["small"], "loras": {"sql": "/x"}}
    answers: dict[str, Any] = {
        "/admin/models": {"data": [{"wish": wish}]},
        "/admin/keys": {"data": [{}], "key": "k"},
    }
    monkeypatch.setattr(keys, "call", lambda _, path, *__: answers[path])
    keys.add("bob", model=["tiny", "tinny", "small", "sql"])
    assert "note: no model is named tinny now." in capsys.readouterr().err
    keys.add("bob", model=["tiny"])
    assert "note" not in capsys.readouterr().err
