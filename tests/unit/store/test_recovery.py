"""A database that cannot be used costs nothing that runs: it is set aside or copied, and changes are refused."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from gateway.errors import StoreError
from gateway.store.database import Database
from gateway.store.recovery import installation_id, open_store
from gateway.store.running_engines import RunningEngine, RunningEngines, restore_running
from gateway.store.store import Store
from tests.support.makers import plan, wish


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database with one model, and the id of its installation beside it."""
    made = tmp_path / "fitserve.db"
    store = open_store(made)
    store.add_model(wish(name="a"), 1.0)
    installation_id(made, store)
    store.close()
    return made


def damaged(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.damaged-*"))


def test_a_sound_database_is_opened_and_may_be_changed(path: Path) -> None:
    store = open_store(path)
    store.changeable()
    assert [one.name for one, *_ in store.models()] == ["a"]
    store.close()
    assert not damaged(path)


@pytest.mark.parametrize("content", [b"", b"garbage " * 1000, b"SQLite format 3\x00" + b"\xff" * 5000])
def test_a_damaged_one_is_set_aside_whole(path: Path, content: bytes) -> None:
    for ending in ("-wal", "-shm"):
        path.with_name(path.name + ending).unlink(missing_ok=True)
    path.write_bytes(content)
    store = open_store(path)
    (aside,) = damaged(path)
    assert aside.read_bytes() == content
    assert not path.exists()
    assert store.problem is not None
    assert aside.name in store.problem
    with pytest.raises(StoreError, match="Nothing can be changed now"):
        store.changeable()
    # The loop goes on working with it.
    assert store.add_attempt("a", 0, plan(), 8000, 1.0).id == 1
    store.close()
    again = open_store(path)
    again.changeable()
    again.close()


def test_pages_that_contradict_each_other_are_damage(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.executemany("INSERT INTO meta VALUES (?, ?)", [(f"k{number}", "x" * 100) for number in range(500)])
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    content = bytearray(path.read_bytes())
    content[4096 * 6 : 4096 * 9] = b"\xa5" * 4096 * 3
    path.write_bytes(content)
    store = open_store(path)
    assert damaged(path)
    assert store.models() == []


def test_a_newer_one_is_left_alone(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    store = open_store(path)
    assert store.problem is not None
    assert "version 99" in store.problem
    assert path.exists()
    assert not damaged(path)


def test_one_that_cannot_be_written_is_copied(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Database, existed: bool) -> None:
        raise sqlite3.OperationalError("attempt to write a readonly database")

    # A read-only folder needs another user or file system than tests have; tests/e2e has the real full disk.
    monkeypatch.setattr(Database, "_open", refuse)
    store = open_store(path)
    assert [one.name for one, *_ in store.models()] == ["a"]
    assert store.problem is not None
    assert "readonly" in store.problem
    assert not damaged(path)


def test_the_installation_keeps_its_id_when_the_database_is_lost(path: Path) -> None:
    store = open_store(path)
    before = installation_id(path, store)
    store.close()
    path.unlink()
    fresh = open_store(path)
    assert installation_id(path, fresh) == before
    fresh.close()


def test_what_runs_is_entered_again_into_an_empty_database(tmp_path: Path) -> None:
    live = RunningEngines(tmp_path)
    first = open_store(tmp_path / "a.db")
    attempt = first.add_attempt("a", 0, plan(), 8000, 5.0)
    live.write("a-r0-a1", RunningEngine(wish=wish(name="a"), created_at=2.0, attempt=attempt))
    (tmp_path / "live" / "torn.json").write_text('{"wish": ')
    empty = Store(tmp_path / "b.db")
    assert restore_running(empty, live) == 1
    assert [(one.name, created) for one, created, *_ in empty.models()] == [("a", 2.0)]
    (restored,) = empty.attempts()
    assert (restored.id, restored.state, restored.plan) == (attempt.id, "starting", attempt.plan)
    # A database that knows a model is right about everything.
    assert restore_running(empty, live) == 0
    live.remove("a-r0-a1")
    live.remove("a-r0-a1")
    assert live.entries() == []
