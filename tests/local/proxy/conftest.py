"""One gateway for all tests of a module, whose requests change their state as described."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gateway.proxy.exchange import NEXT_STATES, Exchange
from tests.support.dataplane import Gateway


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    """Each test sets its own routes and must leave nothing behind."""
    with Gateway() as running:
        yield running


@pytest.fixture(autouse=True)
def _state_changes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each change of a request's state is in NEXT_STATES."""
    wrong: list[str] = []

    def check_and_set(exchange: Exchange, name: str, value: Any) -> None:
        state = getattr(exchange, "state", None)
        if name == "state" and state is not None and value not in NEXT_STATES[state]:
            wrong.append(f"{state} -> {value}")
        object.__setattr__(exchange, name, value)

    monkeypatch.setattr(Exchange, "__setattr__", check_and_set)
    yield
    assert not wrong
