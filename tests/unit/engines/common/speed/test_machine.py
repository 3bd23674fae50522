"""The speed model agrees with measurements on real GPUs, and comes near to published ones."""

from __future__ import annotations

import statistics
import sys

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from speed import compare, published
from speed.clocks import PROFILES

TABLE = PROFILES.speed_knowledge.table


def test_expectations_are_near_measurements_of_two_h200() -> None:
    points = compare.points(compare.lines(*compare.RESULTS))
    relative_errors = [abs(point.expected_figure(TABLE) / point.measured - 1) for point in points]
    assert len(relative_errors) == 259
    assert statistics.median(relative_errors) < 0.04
    lone_errors = [
        abs(point.expected_figure(TABLE) / point.measured - 1)
        for point in points
        if point.what == "tpot"
    ]
    assert statistics.median(lone_errors) < 0.05
    assert max(lone_errors) < 0.25
    right, pairs = compare.count_ordered_pairs(points, TABLE, 0.02)
    assert right / pairs > 0.9


def test_expectations_come_near_published_figures() -> None:
    """Nothing was fitted to these; only models whose configs are here."""
    rows = [row for row in published.rows(None) if isinstance(row, published.Row)]
    small_errors = [abs(each_row.error) for each_row in rows if each_row.figure.concurrency <= 2]
    assert len(small_errors) == 15
    assert statistics.median(small_errors) < 0.2
