"""Batches whose gateway and engine are killed lose no line, and answer none twice."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.batch_kills import kills


def test_killed_gateways_and_engines_cost_no_line_and_answer_none_twice(tmp_path: Path) -> None:
    """How many kills of how many lines hold, `python -m tests.e2e.batch_kills` prints."""
    figures = kills(tmp_path, lines=400, count=4, seed=1, pause_s=0.5)
    assert figures["kills"] == 4
    assert (figures["lost"], figures["twice"], figures["foreign"]) == (0, 0, 0)
