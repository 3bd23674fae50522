"""`fitserve keys`."""

from __future__ import annotations

from inspect import unwrap
from typing import Any

import pytest

from gateway.cli.budget_options import BudgetOptions
from gateway.cli.commands import keys

NO_BUDGET = BudgetOptions()


def test_a_key_for_a_missing_model_is_noted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wish = {"name": "tiny", "aliases": ["small"], "loras": {"sql": "/x"}}
    answers: dict[str, Any] = {
        "/admin/models": {"data": [{"wish": wish}]},
        "/admin/keys": {"data": [{}], "key": "k"},
    }
    calls: list[str] = []

    def call(method: str, path: str, *_: Any) -> Any:
        calls.append(method)
        return answers[path]

    monkeypatch.setattr(keys, "call", call)
    add = unwrap(keys.add)
    add("bob", keys.LimitOptions(model=["tiny", "tinny", "small", "sql"]), NO_BUDGET)
    assert "note: no model is named tinny now." in capsys.readouterr().err
    # The first key closes the gateway to the reading of its models.
    assert calls[-1] == "POST"
    add("bob", keys.LimitOptions(model=["tiny"]), NO_BUDGET)
    assert "note" not in capsys.readouterr().err
