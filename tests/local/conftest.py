"""Forked processes and printed logs of the tests with sockets and processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.measuring.tuning import engine_load
from gateway.planner.service import plan_process
from tests.support import forked
from tests.support.log_lines import printed_logs


@pytest.fixture(autouse=True)
def planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways of tests plan and measure in forked processes: hundreds of them would import the
    planner, a second of processor time each, and a load half a second."""
    monkeypatch.setattr(plan_process, "spawn", forked.spawn)
    monkeypatch.setattr(engine_load, "spawn", forked.spawn)


@pytest.fixture(autouse=True)
def logs() -> Iterator[None]:
    """A test that reads the output finds all that was logged, and so does the reader of a
    failure."""
    with printed_logs():
        yield
