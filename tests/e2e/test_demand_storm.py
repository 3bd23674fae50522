"""Five models, memory for two, eight clients, and the gateway killed in the middle: `python -m
tests.e2e.demand_storm` does it for ten minutes."""

from __future__ import annotations

import random
import time
from pathlib import Path

from tests.e2e.demand_storm import DemandStorm

SECONDS = 20


def test_every_request_for_any_of_five_models_is_answered_in_turn(tmp_path: Path) -> None:
    storm, began = DemandStorm(tmp_path, random.Random(3)), time.monotonic()
    try:
        storm.begin()
        storm.run(SECONDS)
    finally:
        storm.end()
    assert not storm.problems(time.monotonic() - began), storm.gateway.log.read_text()[-6000:]
    assert storm.departures, storm.figures(SECONDS)
