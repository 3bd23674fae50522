"""Usage as it is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.keys import UsageRow
from gateway.store import usage_table
from gateway.store.store import Store
from gateway.store.usage_table import KEPT_DAYS, PARTS


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "fitserve.db")
    yield store
    store.close()


def row(day: int, key: str = "app", model: str = "m", requests: int = 1) -> UsageRow:
    return UsageRow(
        day, key, model, requests, 10 * requests, 5 * requests, 2 * requests, requests, 7 * requests
    )


def test_usage_adds_up_and_survives_a_reopening(store: Store) -> None:
    store.usage.add([row(7), row(7, "b")])
    store.usage.add([row(7, requests=2)])
    store.close()
    second_store = Store(store.path)
    assert second_store.usage.sums(7, 7, PARTS, None, None) == [row(7, requests=3), row(7, "b")]
    second_store.close()


@pytest.mark.parametrize(
    ("columns", "key", "model", "expected"),
    [
        (("key",), None, None, [row(0, "app", "", 3), row(0, "b", "", 4)]),
        (("day",), None, None, [row(7, "", "", 3), row(8, "", "", 4)]),
        (("model",), "app", None, [row(0, "", "m", 1), row(0, "", "n", 2)]),
        (("key", "model"), None, "m", [row(0, "app", "m", 1), row(0, "b", "m", 4)]),
        ((), None, None, [row(0, "", "", 7)]),
    ],
)
def test_columns_that_are_not_asked_for_are_summed_up(
    store: Store, columns: Any, key: str | None, model: str | None, expected: list[UsageRow]
) -> None:
    store.usage.add([row(7), row(7, model="n", requests=2), row(8, "b", requests=4), row(20)])
    assert store.usage.sums(7, 8, columns, key, model) == expected


def test_old_days_of_usage_are_removed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.usage.add([row(1), row(2)])
    store.usage.add([row(KEPT_DAYS + 1)])
    assert [use.day for use in store.usage.sums(0, 10**6, PARTS, None, None)] == [2, KEPT_DAYS + 1]
    monkeypatch.setattr(usage_table, "_MAX_ROWS", 2)
    store.usage.add([row(KEPT_DAYS + 2), row(KEPT_DAYS + 2, "b")])
    assert {use.day for use in store.usage.sums(0, 10**6, PARTS, None, None)} == {KEPT_DAYS + 2}
