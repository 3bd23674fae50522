from __future__ import annotations

import pytest

from gateway.planning import plan_process
from tests.support import forked


@pytest.fixture(autouse=True)
def planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways of tests plan in forked processes: hundreds of them would import the planner, a second of processor time each."""
    monkeypatch.setattr(plan_process, "started", forked.started)
