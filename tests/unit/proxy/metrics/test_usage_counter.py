"""The counts of usage before it is kept."""

from __future__ import annotations

import time

from gateway.keys import UsageRow
from gateway.proxy.metrics.usage_counter import MAX_ROWS, UsageCounter

TODAY = int(time.time()) // 86400


def test_answers_are_summed_by_key_and_model_and_missing_counts_are_marked() -> None:
    counter = UsageCounter()
    counter.count("app", "m", 30, 20, 8, None)
    counter.count("app", "m", 3, None, None, None)
    counter.count("app", "m", None, None, None, 70)
    counter.count("app", "m", None, None, None, None)
    counter.count("app", "m", None, 6, None, 9)
    counter.count("", "m", 1, 1, None, None)
    rows = counter.drain()
    assert [row[1:] for row in rows] == [
        ("app", "m", 5, 33, 26, 8, 2, 79),
        ("", "m", 1, 1, 1, 0, 0, 0),
    ]
    assert all(row.day in (TODAY, TODAY + 1) for row in rows)
    assert counter.drain() == ()


def test_taken_counts_can_be_given_back() -> None:
    counter, other_usage_counter = UsageCounter(), UsageCounter()
    counter.count("app", "m", 30, 20, 8, None)
    other_usage_counter.count("app", "m", 1, 2, 3, None)
    other_usage_counter.count("app", "m", None, None, None, 5)
    counter.add(other_usage_counter.drain())
    assert [row[3:] for row in counter.drain()] == [(3, 31, 22, 11, 1, 5)]


def test_rows_of_usage_are_bounded() -> None:
    counter = UsageCounter()
    counter.add(
        UsageRow(TODAY, "app", f"m{number}", 1, 0, 0, 0, 0, 0) for number in range(MAX_ROWS + 5)
    )
    rows = counter.drain()
    assert len(rows) == MAX_ROWS + 1
    assert rows[-1] == UsageRow(TODAY, "other", "", 5, 0, 0, 0, 0, 0)
