"""The wait of `fitserve run` for a model."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.cli.commands import run


@pytest.mark.parametrize(
    "states",
    [("stopped", "starting", "ready"), ("stopping", "stopping", "stopped", "starting", "ready")],
)
def test_a_model_that_stops_is_loaded_again(
    monkeypatch: pytest.MonkeyPatch, states: tuple[str, ...]
) -> None:
    """`fitserve run` right after `fitserve stop` was refused."""
    left, calls = list(states), []

    def call(method: str, path: str) -> Any:
        calls.append((method, path))
        if method == "POST":
            return {}
        state = left.pop(0)
        return {"name": "m", "state": state, "detail": state, "replicas": [], "change": None}

    monkeypatch.setattr(run, "call", call)
    monkeypatch.setattr(run, "_POLL_S", 0)
    assert run._wait_until_ready("m")["state"] == "ready"
    assert [path for method, path in calls if method == "POST"] == ["/admin/models/m/start"]
