"""A database that cannot be used costs nothing that runs: it is set aside or copied, and changes
are refused."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from gateway.disk_fault import DiskFault
from gateway.domain import Fact
from gateway.domain.grant import Grant
from gateway.errors import StoreError
from gateway.store import database, database_files, mirror
from gateway.store.database import Database
from gateway.store.database_files import mirror_of, remove
from gateway.store.recovery import installation_id, open_store
from gateway.store.running_engines import RunningEngine, RunningEngines, restore_running
from gateway.store.store import Store
from tests.support.makers import plan, wish


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database with one model, and the id of its installation beside it."""
    file = tmp_path / "fitserve.db"
    store = open_store(file)
    store.add_model(wish(name="a"), 1.0)
    installation_id(file, store)
    store.close()
    return file


@pytest.fixture
def lone_database(path: Path) -> Path:
    """The same database without a mirror."""
    remove(mirror_of(path))
    return path


def damaged_files(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.damaged-*"))


def test_a_sound_database_is_opened_and_may_be_changed(path: Path) -> None:
    store = open_store(path)
    store.changeable()
    assert [row.name for row, *_ in store.models()] == ["a"]
    store.close()
    assert not damaged_files(path)


@pytest.mark.parametrize(
    "content", [b"", b"garbage " * 1000, b"SQLite format 3\x00" + b"\xff" * 5000]
)
def test_a_damaged_database_is_set_aside_whole(lone_database: Path, content: bytes) -> None:
    path = lone_database
    for ending in ("-wal", "-shm"):
        path.with_name(path.name + ending).unlink(missing_ok=True)
    path.write_bytes(content)
    store = open_store(path)
    (damaged_file,) = damaged_files(path)
    assert damaged_file.read_bytes() == content
    assert not path.exists()
    assert store.problem is not None
    assert damaged_file.name in store.problem
    with pytest.raises(StoreError, match="Nothing can be changed now"):
        store.changeable()
    # The loop goes on working with it.
    assert store.add_attempt("a", 0, plan(), 8000, 1.0).id == 1
    store.close()
    second_store = open_store(path)
    second_store.changeable()
    second_store.close()


def test_pages_that_contradict_each_other_are_damage(lone_database: Path) -> None:
    path = lone_database
    with sqlite3.connect(path) as db:
        db.executemany(
            "INSERT INTO meta VALUES (?, ?)", [(f"k{number}", "x" * 100) for number in range(500)]
        )
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    content = bytearray(path.read_bytes())
    content[4096 * 6 : 4096 * 9] = b"\xa5" * 4096 * 3
    path.write_bytes(content)
    store = open_store(path)
    assert damaged_files(path)
    assert store.models() == []


def content(store: Store) -> list[object]:
    return [store.models(), store.attempts(), store.numbered_facts(), store.grants()]


@pytest.fixture(scope="module")
def killed_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], list[object]]:
    """The files of a database whose gateway was killed, by their names, and the acknowledged
    changes."""
    file = tmp_path_factory.mktemp("killed") / "fitserve.db"
    store = open_store(file)
    installation_id(file, store)
    for number in range(12):
        store.add_model(wish(name=f"m{number}"), float(number))
        attempt = store.add_attempt(f"m{number}", 0, plan(), 8000, float(number))
        fact = Fact(
            kind="plan_verified",
            scope={"fingerprint": f"f{number}"},
            grade="verified",
            source="it works",
            attempt=attempt.id,
            at=1.0,
        )
        store.save_attempt(attempt.evolve(state="ready", ready_at=1.0), fact)
        store.add_key(Grant(name=f"k{number}", models=(f"m{number}",)), os.urandom(32), 1.0)
    store.mark_deleting("m0")
    store.remove_model("m0")
    files = {file.name: file.read_bytes() for file in file.parent.iterdir()}
    stored_content = content(store)
    store.close()
    return files, stored_content


MIRROR = "fitserve.db.mirror"


@pytest.mark.parametrize(
    "victims",
    [
        ("fitserve.db",),
        ("fitserve.db-wal",),
        ("fitserve.db-shm",),
        (MIRROR, f"{MIRROR}-wal", f"{MIRROR}-shm"),
        ("fitserve.db", MIRROR, f"{MIRROR}-wal"),
    ],
)
@pytest.mark.parametrize("part", range(4))
def test_damaged_bytes_of_the_database_are_repaired_or_reported(
    tmp_path: Path,
    killed_files: tuple[dict[str, bytes], list[object]],
    victims: tuple[str, ...],
    part: int,
) -> None:
    """Nothing is lost in silence, and nothing is worse than a database that is set aside.
    DAMAGES=10000 in the environment: so many of each file."""
    files, stored_content = killed_files
    report_count = 0
    for number in range(rounds := max(1, int(os.environ.get("DAMAGES", "60")) // 4)):
        chance = random.Random(f"{part} {number}")
        folder = tmp_path / str(number)
        folder.mkdir()
        content_of = {name: bytearray(data) for name, data in files.items()}
        for damage in (content_of[victim] for victim in victims):
            for _ in range(chance.choice((1, 1, 3, 20))):
                at, size = chance.randrange(len(damage)), chance.choice((1, 1, 8, 600))
                damage[at : at + size] = chance.randbytes(len(damage[at : at + size]))
        for name, data in content_of.items():
            (folder / name).write_bytes(data)
        store = open_store(folder / "fitserve.db")
        try:
            if store.problem is None:
                assert content(store) == stored_content, number
                # The next changes find no damage either.
                store.add_model(wish(name="new"), 1.0)
                for model, *_ in store.models():
                    store.mark_deleting(model.name)
                    store.remove_model(model.name)
                for grant, *_ in store.grants():
                    store.remove_key(grant.name)
                assert (store.models(), store.grants(), store.attempts()) == ([], [], []), number
            else:
                report_count += 1
                assert damaged_files(folder / "fitserve.db") or "has version" in store.problem, (
                    store.problem
                )
                assert content(store) == [[], [], [], []]
        finally:
            store.close()
        shutil.rmtree(folder)
    # The journal has nothing that the database has not, and one sound file of two is enough.
    assert (report_count > 0) is (victims[:2] == ("fitserve.db", MIRROR)), (
        f"{report_count} of {rounds}"
    )


def test_a_database_that_somebody_else_holds_is_not_taken_for_damaged(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, **{**k, "timeout": 0}))
    with contextlib.closing(connect(path, isolation_level=None)) as other_connection:
        other_connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        other_connection.execute("BEGIN EXCLUSIVE")
        store = open_store(path)
        assert store.problem is not None
        assert "locked" in store.problem
        store.close()
    assert not damaged_files(path)
    second_store = open_store(path)
    second_store.changeable()
    assert [row.name for row, *_ in second_store.models()] == ["a"]
    second_store.close()


def test_a_newer_database_is_left_alone(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    store = open_store(path)
    assert store.problem is not None
    assert "version 99" in store.problem
    assert path.exists()
    assert not damaged_files(path)


def test_a_read_only_database_is_copied(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Database) -> None:
        raise sqlite3.OperationalError("attempt to write a readonly database")

    # A read-only folder needs another user or file system than tests have; tests/e2e has the real
    # full disk.
    monkeypatch.setattr(Database, "_open_database", refuse)
    store = open_store(path)
    assert [row.name for row, *_ in store.models()] == ["a"]
    assert store.problem is not None
    assert "readonly" in store.problem
    assert not damaged_files(path)


@pytest.fixture
def unwritable(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """No database can be written until the call."""

    def refuse(self: Database) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Database, "_open_database", refuse)
    return monkeypatch.undo


def test_a_copy_is_written_into_its_file_as_soon_as_that_is_possible(
    path: Path, unwritable: Callable[[], None]
) -> None:
    store = open_store(path)
    store.inspect()
    with pytest.raises(StoreError, match="Nothing can be changed now"):
        store.changeable()
    attempt = store.add_attempt("a", 0, plan(), 8000, 1.0)
    unwritable()
    store.inspect()
    store.changeable()
    assert store.problem is None
    # A kill instead of an end: both are in the file itself, and in its mirror.
    store.add_model(wish(name="b"), 2.0)
    overwrite(path, 7)
    second_store = open_store(path)
    second_store.changeable()
    assert [row.name for row, *_ in second_store.models()] == ["a", "b"]
    assert [each_attempt.id for each_attempt in second_store.attempts()] == [attempt.id]
    second_store.close()
    store.close()


def test_a_copy_replaces_no_rows_of_others(path: Path, unwritable: Callable[[], None]) -> None:
    store = open_store(path)
    store.add_attempt("a", 0, plan(), 8000, 1.0)
    unwritable()
    other_store = Store(path)
    other_store.add_model(wish(name="b"), 2.0)
    other_store.close()
    store.inspect()
    with pytest.raises(StoreError, match="Nothing can be changed now"):
        store.changeable()
    store.close()
    second_store = open_store(path)
    assert [row.name for row, *_ in second_store.models()] == ["a", "b"]
    assert second_store.attempts() == []
    second_store.close()


def test_a_first_start_without_room_makes_its_database_later(
    tmp_path: Path, unwritable: Callable[[], None]
) -> None:
    path = tmp_path / "fitserve.db"
    store = open_store(path)
    instance = store.instance
    assert store.problem is not None
    path.unlink(missing_ok=True)
    unwritable()
    store.inspect()
    store.changeable()
    store.add_model(wish(name="a"), 1.0)
    store.close()
    second_store = open_store(path)
    assert second_store.instance == instance
    assert [row.name for row, *_ in second_store.models()] == ["a"]
    second_store.close()


def test_the_installation_keeps_its_id_when_the_database_is_lost(path: Path) -> None:
    store = open_store(path)
    before = installation_id(path, store)
    store.close()
    path.unlink()
    new_store = open_store(path)
    assert installation_id(path, new_store) == before
    new_store.close()


def test_running_engines_are_entered_again_into_an_empty_database(tmp_path: Path) -> None:
    live = RunningEngines(tmp_path)
    first_store = open_store(tmp_path / "a.db")
    attempt = first_store.add_attempt("a", 0, plan(), 8000, 5.0)
    live.write("a-r0-a1", RunningEngine(wish=wish(name="a"), created_at=2.0, attempt=attempt))
    (tmp_path / "live" / "torn.json").write_text('{"wish": ')
    empty = Store(tmp_path / "b.db")
    assert restore_running(empty, live) == 1
    assert [(row.name, created_at) for row, created_at, *_ in empty.models()] == [("a", 2.0)]
    (new_attempt,) = empty.attempts()
    assert (new_attempt.id, new_attempt.state, new_attempt.plan) == (
        attempt.id,
        "starting",
        attempt.plan,
    )
    # A database that knows a model is right about everything.
    assert restore_running(empty, live) == 0
    live.remove("a-r0-a1")
    live.remove("a-r0-a1")
    assert live.entries() == []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the database's clock is ahead."""
    ahead = [0.0]
    monkeypatch.setattr(mirror, "time", SimpleNamespace(monotonic=lambda: ahead[0]))
    return ahead


def overwrite(path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with path.open("r+b") as file:
        size = path.stat().st_size
        for _ in range(20):
            file.seek(chance.randrange(size))
            file.write(chance.randbytes(600))


def replace(path: Path) -> None:
    other_name = path.with_name("other")
    other_name.write_bytes(path.read_bytes())
    other_name.replace(path)


def put_older(path: Path) -> None:
    """A sound database of an earlier time, over the file."""
    other_store = Store(path.with_name("older"))
    path.write_bytes(other_store.path.read_bytes())
    other_store.close()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "bytes": lambda path: overwrite(path, 1),
    "all bytes": lambda path: path.write_bytes(random.Random(2).randbytes(path.stat().st_size)),
    "cut": lambda path: os.truncate(path, 4096),
    "emptied": lambda path: os.truncate(path, 0),
    "removed": Path.unlink,
    "replaced": replace,
    "older": put_older,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_damaged_while_open_takes_no_change_and_loses_none(
    tmp_path: Path, clock: list[float], damage: str
) -> None:
    path = tmp_path / "fitserve.db"
    store = open_store(path)
    for number in range(42):
        store.add_model(wish(name=f"m{number}"), 1.0)
    store.add_attempt("m0", 0, plan(), 8000, 1.0)
    before = content(store)
    DAMAGES[damage](path)
    for number in range(3):
        with pytest.raises(StoreError, match="was damaged while the gateway ran"):
            store.add_model(wish(name=f"late{number}"), 1.0)
    # Reading goes on from the mirror.
    assert content(store) == before
    store.inspect()
    with pytest.raises(StoreError):
        store.check()
    clock[0] += 11
    store.inspect()
    store.check()
    store.add_model(wish(name="new"), 2.0)
    assert len(store.models()) == 43
    # A kill instead of an end, and a start.
    second_store = open_store(path)
    second_store.changeable()
    assert [row.name for row, *_ in second_store.models()] == [
        row.name for row, *_ in store.models()
    ]
    assert damaged_files(path) or damage == "removed"
    store.close()
    second_store.close()


def test_a_gateway_that_ends_before_the_repair_begins_with_the_mirror(path: Path) -> None:
    store = open_store(path)
    store.add_model(wish(name="b"), 1.0)
    overwrite(path, 3)
    second_store = open_store(path)
    second_store.changeable()
    assert [row.name for row, *_ in second_store.models()] == ["a", "b"]
    second_store.close()
    store.close()


def test_damage_within_the_tick_of_the_last_change_is_found_by_a_look(
    path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(path)
    store.add_model(wish(name="b"), 1.0)
    overwrite(path, 4)
    # The clock of the file system is too coarse to tell the two writers apart.
    monkeypatch.setattr(store._database._mirror, "_stamp", database_files.stamp(path))
    clock[0] += 6
    store.inspect()
    assert store.failing is not None
    store.close()


def test_writing_that_goes_on_postpones_the_repair(path: Path, clock: list[float]) -> None:
    store = open_store(path)
    store.add_model(wish(name="b"), 1.0)
    for seed in range(3):
        overwrite(path, seed)
        clock[0] += 9
        store.inspect()
        with pytest.raises(StoreError):
            store.check()
    clock[0] += 11
    store.inspect()
    store.check()
    store.close()


def test_a_mirror_that_is_damaged_while_open_is_made_anew(path: Path, clock: list[float]) -> None:
    store = open_store(path)
    store.add_model(wish(name="b"), 1.0)
    overwrite(mirror_of(path), 5)
    for number in range(30):
        store.add_model(wish(name=f"m{number}"), 1.0)
        clock[0] += 6
        store.inspect()
    assert store.failing is None
    overwrite(path, 6)
    second_store = open_store(path)
    assert len(second_store.models()) == 32
    second_store.close()
    store.close()


def test_other_programs_may_read_the_file_and_change_its_mode(path: Path) -> None:
    store = open_store(path)
    store.add_model(wish(name="b"), 1.0)
    with contextlib.closing(sqlite3.connect(path)) as other_connection:
        assert other_connection.execute("SELECT count(*) FROM models").fetchone() == (2,)
    path.chmod(0o640)
    store.add_model(wish(name="c"), 1.0)
    assert store.failing is None
    store.close()


def test_a_small_change_on_a_full_disk_leaves_the_store_failing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(path)
    with pytest.raises(StoreError), store._database.change():
        raise sqlite3.OperationalError("database or disk is full")
    fault = DiskFault("no space is left", "Free disk space")
    monkeypatch.setattr(database, "disk_fault", lambda folder, error=None: fault)
    store.add_model(wish(name="b"), 1.0)
    assert store.failing is not None
    monkeypatch.undo()
    store.add_model(wish(name="c"), 1.0)
    assert not store.failing
    store.close()
