"""Starts that succeeded: kept after their models, bounded, and read without a running gateway."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from gateway.diagnosis.start_times import measured_start
from gateway.domain import StartConditions
from gateway.store.recovery import records_at_rest
from gateway.store.start_table import MAX_STARTS
from gateway.store.store import Store
from tests.support.makers import attempt, wish

START = measured_start(
    attempt(phases={"import": 3.5, "load": 1.0}),
    StartConditions(origin="fork", is_cache_empty=False),
)


def test_starts_outlive_their_models(tmp_path: Path) -> None:
    store = Store(tmp_path / "fitserve.db")
    store.add_model(wish(name="m"), 1.0)
    store.starts.add(START)
    store.mark_deleting("m")
    store.remove_model("m")
    assert store.starts.rows() == [START]
    assert [*store.starts.rows()[0].phases] == ["import", "load"]
    assert records_at_rest(store.path)[1] == [START]
    store.close()


def test_the_oldest_starts_make_room(tmp_path: Path) -> None:
    store = Store(tmp_path / "fitserve.db")
    for number in range(MAX_STARTS + 2):
        store.starts.add(START.evolve(gpus=number))
    assert [row.gpus for row in store.starts.rows()] == [*range(2, MAX_STARTS + 2)]
    store.close()


def test_a_damaged_row_is_left_out(tmp_path: Path) -> None:
    store = Store(tmp_path / "fitserve.db")
    store.starts.add(START)
    store.close()
    with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as db:
        db.execute("INSERT INTO starts (start) VALUES ('{\"model\": 1}')")
    second_store = Store(store.path)
    assert second_store.starts.rows() == [START]
    second_store.close()


def test_an_older_database_gets_room_for_starts(tmp_path: Path) -> None:
    store = Store(tmp_path / "fitserve.db")
    store.close()
    with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as db:
        db.execute("DROP TABLE starts")
        db.execute("ALTER TABLE usage DROP COLUMN estimated_tokens")
        db.execute("PRAGMA user_version=14")
    assert records_at_rest(store.path)[1] == []
    second_store = Store(store.path)
    second_store.starts.add(START)
    assert second_store.starts.rows() == [START]
    second_store.close()


def test_no_database_has_no_starts(tmp_path: Path) -> None:
    assert records_at_rest(tmp_path / "fitserve.db") == ([], [])
