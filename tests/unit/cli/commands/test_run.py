"""The wait of `fitserve run` for a model."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.cli.commands import run
from gateway.errors import NotReady


@pytest.mark.parametrize(
    "states",
    [("stopped", "starting", "ready"), ("stopping", "stopping", "stopped", "starting", "ready")],
)
def test_a_model_that_stops_is_loaded_again(
    monkeypatch: pytest.MonkeyPatch, states: tuple[str, ...]
) -> None:
    """`fitserve run` right after `fitserve stop` was refused."""
    posts = answer_states(monkeypatch, states)
    assert run._wait_until_ready("m")["state"] == "ready"
    assert posts == ["/admin/models/m/start"]


@pytest.mark.parametrize(
    ("states", "starts"),
    [
        (("starting", "stopping", "stopped"), 0),
        (("stopped", "stopped", "starting", "stopped"), 1),
    ],
)
def test_a_stop_during_the_wait_ends_it(
    monkeypatch: pytest.MonkeyPatch, states: tuple[str, ...], starts: int
) -> None:
    posts = answer_states(monkeypatch, states)
    with pytest.raises(NotReady, match="stopped"):
        run._wait_until_ready("m")
    assert len(posts) == starts


def answer_states(monkeypatch: pytest.MonkeyPatch, states: tuple[str, ...]) -> list[str]:
    """Answer looks at the model with these states. Returns the paths of the orders."""
    next_states, posts = list(states), list[str]()

    def call(method: str, path: str) -> Any:
        if method == "POST":
            posts.append(path)
            return {}
        state = next_states.pop(0)
        return {"name": "m", "state": state, "detail": state, "replicas": [], "change": None}

    monkeypatch.setattr(run, "call", call)
    monkeypatch.setattr(run, "_POLL_S", 0)
    return posts
