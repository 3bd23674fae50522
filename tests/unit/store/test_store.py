"""Models, attempts, facts and keys in the database."""

import contextlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.domain import Bench, Cap, Change, Fact, Failure
from gateway.domain.grant import Grant
from gateway.errors import Conflict, NotFound, StoreError
from gateway.store.database import DamagedDatabaseError
from gateway.store.measured_facts import measured_facts
from gateway.store.store import Store
from tests.support.makers import plan, wish


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "fitserve.db")
    yield store
    store.close()


def test_models_survive_a_reopening(store: Store) -> None:
    store.add_model(wish(name="a", min_context=5), 1.0)
    store.close()
    second_store = Store(store.path)
    assert second_store.models() == [(wish(name="a", min_context=5), 1.0, False, 0.0)]
    assert second_store.instance == second_store.instance
    second_store.close()


def test_the_database_is_durable_and_private(store: Store) -> None:
    assert store._database.connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert store._database.connection.execute("PRAGMA synchronous").fetchone()[0] == 2
    # A damaged journal loses nothing: acknowledged changes are in the database itself.
    store.add_model(wish(name="a"), 1.0)
    (store.path.with_name("alone.db")).write_bytes(store.path.read_bytes())
    lone_store = Store(store.path.with_name("alone.db"))
    assert [row.name for row, *_ in lone_store.models()] == ["a"]
    lone_store.close()
    assert store.path.stat().st_mode & 0o077 == 0


def test_a_name_is_taken_until_its_model_is_removed(store: Store) -> None:
    store.add_model(wish(name="a"), 1.0)
    with pytest.raises(Conflict, match="exists already"):
        store.add_model(wish(name="a"), 2.0)
    store.mark_deleting("a")
    with pytest.raises(Conflict, match="still being removed"):
        store.add_model(wish(name="a"), 2.0)
    store.remove_model("a")
    store.add_model(wish(name="a"), 3.0)
    with pytest.raises(NotFound):
        store.mark_deleting("b")


def test_attempts_and_the_fact_of_their_failure_are_one_change(store: Store) -> None:
    attempt = store.add_attempt("a", 0, plan(), 8000, 1.0)
    failure = Failure(kind="kv_too_small", phase="starting", message="m", line="l")
    fact = Fact(
        kind="max_context",
        scope={"engine": "x"},
        value=8064,
        grade="failed",
        source="l",
        attempt=attempt.id,
        at=2.0,
    )
    store.save_attempt(attempt.evolve(state="failed", ended_at=2.0, failure=failure), fact)
    assert store.attempts("a")[0].failure == failure
    assert store.facts() == [fact]
    assert store.attempts("b") == []


def test_removing_a_model_forgets_failed_plans_but_not_limits(store: Store) -> None:
    store.add_model(wish(name="a"), 1.0)
    attempt = store.add_attempt("a", 0, plan(), 8000, 1.0)
    limit = Fact(
        kind="max_context",
        scope={"engine": "x"},
        value=1,
        grade="failed",
        source="l",
        attempt=attempt.id,
    )
    ruled_out = Fact(
        kind="plan_failed",
        scope={"fingerprint": "f"},
        grade="failed",
        source="l",
        attempt=attempt.id,
    )
    for fact in (limit, ruled_out):
        store.save_attempt(attempt.evolve(state="failed"), fact)
    store.mark_deleting("a")
    store.remove_model("a")
    assert store.facts() == [limit]


def test_a_removed_model_keeps_its_failed_plans_if_another_worked(store: Store) -> None:
    store.add_model(wish(name="a"), 1.0)
    first, second = (store.add_attempt("a", 0, plan(), 8000, 1.0) for _ in range(2))
    ruled_out = Fact(
        kind="plan_failed", scope={"fingerprint": "f"}, grade="failed", source="l", attempt=first.id
    )
    store.save_attempt(first.evolve(state="failed"), ruled_out)
    store.save_attempt(second.evolve(state="ready", ready_at=2.0))
    store.mark_deleting("a")
    store.remove_model("a")
    assert store.facts() == [ruled_out]


def test_the_history_of_attempts_is_bounded(store: Store) -> None:
    for _ in range(60):
        attempt = store.add_attempt("a", 0, plan(), 8000, 1.0)
        store.save_attempt(attempt.evolve(state="failed"))
    assert len(store.attempts("a")) <= 51


def test_a_full_disk_refuses_the_change_and_keeps_earlier_rows(store: Store) -> None:
    store.add_model(wish(name="a"), 1.0)
    pages = store._database.connection.execute("PRAGMA page_count").fetchone()[0]
    store._database.connection.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(StoreError, match="Nothing was changed") as error:
        for number in range(1000):
            store.add_model(wish(name=f"b{number}", args={"x": "y" * 4000}), 1.0)
        assert "no space is left in" in str(error.value)
    store._database.connection.execute("PRAGMA max_page_count=1000000")
    store.add_model(wish(name="z"), 1.0)
    assert {row.name for row, *_ in store.models()} >= {"a", "z"}


def test_a_read_only_folder_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StoreError, match="could not be opened"):
        Store(file / "fitserve.db")


def test_garbage_is_not_a_database(tmp_path: Path) -> None:
    path = tmp_path / "fitserve.db"
    path.write_bytes(b"not a database, but long enough to be taken for one" * 100)
    with pytest.raises(StoreError):
        Store(path)


def test_a_database_of_another_version_is_left_alone(store: Store) -> None:
    store._database.connection.execute("PRAGMA user_version=99")
    store.close()
    with pytest.raises(StoreError, match="version 99"):
        Store(store.path)


def test_acknowledged_models_survive_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "fitserve.db"
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from gateway.domain import Wish\n"
        "from gateway.store.store import Store\n"
        f"store = Store(Path({str(path)!r}))\n"
        "for number in range(10**9):\n"
        "    store.add_model(Wish(name=f'm{number}', source='/x'), 1.0)\n"
        "    print(number, flush=True)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    assert child.stdout is not None
    last = -1
    for line in child.stdout:
        last = int(line)
        if last == 20:
            child.kill()
    child.wait()
    child.stdout.close()
    names = {row[0] for row in sqlite3.connect(path).execute("SELECT name FROM models")}
    assert last >= 20
    assert {f"m{number}" for number in range(last + 1)} <= names


def without_changes(db: sqlite3.Connection) -> None:
    """As it was before changes in place, and before models were loaded on request."""
    columns = (("models", "generation"), ("models", "change"), ("attempts", "generation"))
    db.execute("DROP TABLE events")
    db.execute("DROP TABLE usage")
    for table, column in (
        *columns,
        ("models", "stopped"),
        ("models", "used_at"),
        ("attempts", "asleep"),
        ("attempts", "phases"),
    ):
        db.execute(f"ALTER TABLE {table} DROP COLUMN {column}")


def set_back(store: Store, version: int) -> None:
    """Closes the store, and leaves its database as that version would have written it."""
    store.close()
    with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as db:
        for table in ("models", "attempts", "facts", "keys"):
            db.execute(f"ALTER TABLE {table} DROP COLUMN seal")
        without_changes(db)
        db.execute("DROP TABLE benches")
        db.execute("ALTER TABLE attempts DROP COLUMN abilities")
        if version < 3:
            db.execute("DROP TABLE keys")
        if version < 2:
            db.execute("ALTER TABLE models DROP COLUMN forgiven_at")
        db.execute(f"PRAGMA user_version={version}")


def test_a_database_of_the_first_version_is_brought_to_this_one(store: Store) -> None:
    store.add_model(wish(name="a"), 1.0)
    set_back(store, 1)
    second_store = Store(store.path)
    assert second_store.models() == [(wish(name="a"), 1.0, False, 0.0)]
    second_store.close()


def test_a_database_of_the_third_version_gets_seals(store: Store) -> None:
    store.add_model(wish(name="a"), 1.0)
    store.add_key(Grant(name="app"), b"d" * 32, 5.0)
    set_back(store, 3)
    for _ in range(2):
        second_store = Store(store.path)
        assert [row.name for row, *_ in second_store.models()] == ["a"]
        second_store.close()
    with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as db:
        db.execute("UPDATE keys SET may=replace(may, 'inference', 'admin')")
    with pytest.raises(DamagedDatabaseError, match="a row of keys"):
        Store(store.path)


def test_a_database_of_version_5_pins_each_model_to_its_served_commits(
    store: Store,
) -> None:
    old, served_commit, later, draft_commit = ("0" * 40, "1" * 40, "2" * 40, "3" * 40)
    store.add_model(wish(name="a", source="org/name", drafter="org/drafter"), 1.0)
    store.add_model(wish(name="b", source="org/name", revision="v1"), 1.0)
    store.add_model(wish(name="c", source="/a/folder"), 1.0)
    plain = plan()
    for name, commit, ready in (
        ("a", old, None),
        ("a", served_commit, 3.0),
        ("a", later, None),
        ("b", later, None),
    ):
        model = plain.model.evolve(source="org/name", revision=commit)
        drafter = plain.model.evolve(source="org/drafter", revision=draft_commit)
        attempt = store.add_attempt(
            name, 0, plain.evolve(model=model, drafter=drafter if name == "a" else None), 1, 2.0
        )
        store.save_attempt(attempt.evolve(ready_at=ready))
    store.add_attempt("c", 0, plain, 1, 2.0)
    store.close()
    with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as db:
        without_changes(db)
        db.execute("ALTER TABLE attempts DROP COLUMN abilities")
        db.execute("PRAGMA user_version=5")
    second_store = Store(store.path)
    assert [row.commits for row, *_ in second_store.models()] == [
        {"org/name": served_commit, "org/drafter": draft_commit},
        {"org/name@v1": later},
        {},
    ]
    second_store.close()
    Store(store.path).close()


def test_a_claim_that_was_told_in_tokens_is_forgotten(store: Store) -> None:
    store.add_model(wish(name="a"), 1.0)
    old_plan, kept_plan = plan(), plan().evolve(cap=Cap(bytes=2**30, models=("b",)))
    for stored_plan in (old_plan, kept_plan):
        store.add_attempt("a", 0, stored_plan, 1, 2.0)
    store.close()
    with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as db:
        db.execute(
            'UPDATE attempts SET plan=json_set(plan, \'$.cap\', json(\'{"tokens": 4096, "models":'
            ' ["b"]}\')) WHERE id=1'
        )
        db.execute("UPDATE attempts SET seal=NULL")
        db.execute("ALTER TABLE attempts DROP COLUMN phases")
        db.execute("ALTER TABLE usage DROP COLUMN estimated_tokens")
        db.execute("PRAGMA user_version=12")
    for _ in range(2):
        second_store = Store(store.path)
        assert [attempt.plan.cap for attempt in second_store.attempts("a")] == [None, kept_plan.cap]
        second_store.close()


def test_a_stored_context_refuses_no_earlier_plan(store: Store) -> None:
    old = {
        "a": wish(name="a", context=65536),
        "b": wish(name="b", context=4096, min_context=8192),
        "c": wish(name="c", context=65536, max_context=8192),
        "d": wish(name="d", max_context=8192),
    }
    for row in old.values():
        store.add_model(row, 1.0)
    change = Change(wish=old["d"].evolve(context=65536), generation=1, at=2.0)
    store.save_change(old["d"], 1, change)
    store.close()
    with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as db:
        db.execute("PRAGMA user_version=16")
    for _ in range(2):
        second_store = Store(store.path)
        contexts = {
            row.name: (row.least_context, row.context, row.most_context)
            for row, *_ in second_store.models()
        }
        pending = second_store.changes()["d"][1]
        second_store.close()
        assert pending is not None
        assert (pending.wish.least_context, pending.wish.context) == (1, 8192)
        assert contexts == {
            "a": (1, 65536, 65536),
            "b": (8192, 8192, 8192),
            "c": (1, 8192, 8192),
            "d": (None, None, 8192),
        }


def test_a_database_without_times_of_starts_keeps_its_attempts_and_gets_room(
    store: Store,
) -> None:
    store.add_model(wish(name="a"), 1.0)
    attempt = store.add_attempt("a", 0, plan(), 1, 2.0)
    store.close()
    with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as db:
        db.execute("ALTER TABLE attempts DROP COLUMN phases")
        db.execute("ALTER TABLE usage DROP COLUMN estimated_tokens")
        db.execute("PRAGMA user_version=13")
    second_store = Store(store.path)
    assert second_store.attempts("a") == [attempt]
    timed_attempt = attempt.evolve(phases={"import": 3.5, "load": 1.0})
    second_store.save_attempt(timed_attempt)
    second_store.close()
    second_store = Store(store.path)
    assert second_store.attempts("a") == [timed_attempt]
    assert [*second_store.attempts("a")[0].phases] == ["import", "load"]
    second_store.close()


def test_a_database_of_the_second_version_gets_room_for_keys(store: Store) -> None:
    set_back(store, 2)
    second_store = Store(store.path)
    second_store.add_key(Grant(name="app", models=("m",)), b"d" * 32, 5.0)
    second_store.close()
    second_store = Store(store.path)
    assert second_store.grants() == [(Grant(name="app", models=("m",)), b"d" * 32, 5.0)]
    with pytest.raises(Conflict, match="app"):
        second_store.add_key(Grant(name="app"), b"e" * 32, 6.0)
    second_store.remove_key("app")
    assert second_store.grants() == []
    with pytest.raises(NotFound):
        second_store.remove_key("app")
    second_store.close()


def test_measurements_are_kept_and_newer_ones_replace_older(
    store: Store,
) -> None:
    store.add_model(wish(name="a"), 1.0)

    def make_fact(value: int, figure: str = "stream") -> Fact:
        return Fact(
            kind="speed_ratio",
            scope={"figure": figure},
            value=value,
            samples=1,
            grade="verified",
            source="s",
            at=float(value),
        )

    runs = [
        Bench(model="a", at=float(at), prompt=1, answer=1, stream=float(at)) for at in range(1, 61)
    ]
    store.add_bench(runs[0], [make_fact(900), make_fact(800, "total")])
    for run in runs[1:]:
        store.add_bench(run, [make_fact(round(1000 + run.at))])
    assert store.benches("a") == runs[10:]
    assert [(fact.scope["figure"], fact.value) for fact in store.facts()] == [
        ("total", 800),
        ("stream", 1060),
    ]
    store.close()
    second_store = Store(store.path)
    assert second_store.benches("a") == runs[10:]
    second_store.mark_deleting("a")
    second_store.remove_model("a")
    assert second_store.benches("a") == []
    second_store.close()


def test_new_measurements_of_a_machine_replace_old_ones_and_their_ratios(
    store: Store,
) -> None:
    def fact(kind: str, value: int, **scope: str) -> Fact:
        return Fact.model_validate(
            {"kind": kind, "scope": scope, "value": value, "grade": "verified", "source": "s"}
        )

    limit = fact("max_context", 9, model="m")
    store.add_facts(
        [
            limit,
            fact("speed_ratio", 900, figure="stream"),
            fact("speed_measured", 5, figure="stream"),
        ]
    )
    store.store_measurements([])
    assert len(store.facts()) == 3
    store.store_measurements(
        [
            fact("machine_speed", 1, what="memory", gpus="a"),
            fact("machine_speed", 2, what="memory", gpus="b"),
        ]
    )
    store.store_measurements([fact("machine_speed", 3, gpus="a", what="memory")])
    rows = [(each_fact.kind, each_fact.value) for each_fact in store.facts()]
    assert rows == [
        ("max_context", 9),
        ("speed_measured", 5),
        ("machine_speed", 2),
        ("machine_speed", 3),
    ]
    assert [fact.value for fact in measured_facts(store.path)] == [2, 3]
    assert measured_facts(store.path.with_name("none.db")) == []
    store.path.with_name("other.db").write_text("no database")
    assert measured_facts(store.path.with_name("other.db")) == []


def test_a_network_is_kept_once_and_other_facts_stay(store: Store) -> None:
    def fact(value: int, nodes: str, quantity: str) -> Fact:
        scope = {"nodes": nodes, "addresses": "10.0.0.1,10.0.0.2", "what": quantity}
        return Fact(
            kind="network_speed", scope=scope, value=value, grade="verified", source="x", at=1.0
        )

    ratio = Fact(kind="speed_ratio", scope={}, value=1, grade="verified", source="x", at=1.0)
    store.add_facts([ratio])
    store.store_networks([fact(1, "a,b", "bandwidth"), fact(2, "a,b", "latency")])
    store.store_networks([fact(3, "a,c", "bandwidth")])
    store.store_networks([fact(4, "a,b", "bandwidth")])
    assert [fact.value for fact in store.facts()] == [1, 2, 3, 4]
    networks = measured_facts(store.path, "network_speed")
    assert [fact.value for fact in networks] == [2, 3, 4]
    assert measured_facts(store.path) == []


def test_forgiven_failures_may_be_tried_again_and_learnt_facts_stay(store: Store) -> None:
    store.add_model(wish(name="a"), 1.0)
    capable, model_scope = {"engine": "v", "capability": "8.6"}, {"engine": "v", "model": "m"}
    lessons = (
        ("plan_failed", {"fingerprint": "p"}, 2.0),
        ("max_context", {"fingerprint": "m"}, 3.0),
        ("engine_fails", capable, 3.1),
        ("engine_fails", model_scope, 3.2),
    )
    for kind, scope, at in lessons:
        attempt = store.add_attempt("a", 0, plan(), 8000, at)
        fact = Fact.model_validate(
            {
                "kind": kind,
                "scope": scope,
                "value": 5,
                "grade": "failed",
                "source": "l",
                "attempt": attempt.id,
                "at": at,
            }
        )
        store.save_attempt(
            attempt.evolve(
                state="failed", ended_at=at, failure=Failure(kind="x", phase="y", message="z")
            ),
            fact,
        )
    store.forgive("a", 4.0)
    rows = [(fact.kind, fact.scope) for fact in store.facts()]
    assert rows == [("max_context", {"fingerprint": "m"}), ("engine_fails", capable)]
    assert store.models()[0][3] == 4.0
    with pytest.raises(NotFound):
        store.forgive("b", 5.0)


def test_a_change_is_kept_until_it_is_over(store: Store) -> None:
    store.add_model(wish(name="a"), 1.0)
    assert store.changes() == {"a": (0, None)}
    change = Change(wish=wish(name="a", min_context=5), generation=1, at=2.0)
    store.save_change(wish(name="a"), 0, change)
    attempt = store.add_attempt("a", 0, plan(), 8000, 3.0, 1)
    store.close()
    second_store = Store(store.path)
    assert second_store.changes() == {"a": (0, change)}
    assert second_store.attempts() == [attempt]
    second_store.save_change(change.wish, 1, None)
    assert second_store.changes() == {"a": (1, None)}
    assert second_store.models()[0][0] == change.wish
    second_store.mark_deleting("a")
    with pytest.raises(NotFound):
        second_store.save_change(change.wish, 2, None)
    second_store.close()
