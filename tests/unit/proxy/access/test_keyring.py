"""A change of one key makes nothing of the others anew."""

from __future__ import annotations

import queue
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.domain.grant import Allowance, Grant
from gateway.proxy.access.auth import Keys, KeyTable
from gateway.proxy.access.keyring import Keyring
from gateway.secret import Secret
from gateway.store.store import Store
from tests.support.budgets import budget_book
from tests.support.patience import hang_s


def test_a_change_of_one_key_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    store, keys = Store(tmp_path / "fitserve.db"), Keys(Secret("k" * 40), None)
    changes: list[int] = []
    ring = Keyring(
        store,
        tmp_path,
        keys,
        lambda: changes.append(len(keys.table.keys)),
        budget_book(store, tmp_path),
    )
    keys_by_name = {name: ring.add(Grant(name=name)) for name in ("a", "b", "c")}
    before = {key.name: key for key in keys.table.keys.values()}
    ring.remove("b")
    ring.add(Grant(name="d", models=("m",)))
    after = {key.name: key for key in keys.table.keys.values()}
    assert after.keys() == {"admin", "a", "c", "d"}
    assert all(after[name] is before[name] for name in ("a", "c"))
    assert after["d"].models == frozenset({"m"})
    assert changes == [2, 3, 4, 3, 4]
    assert keys.check(b"Bearer " + keys_by_name["a"].reveal_bytes(), "inference") is after["a"]
    second_keyring = Keyring(
        store,
        tmp_path,
        Keys(Secret("k" * 40), None),
        lambda: None,
        budget_book(store, tmp_path),
    )
    second_keyring.load()
    assert second_keyring.stored_keys == ring.stored_keys
    ring.close()
    store.close()


def test_the_end_of_a_key_makes_a_new_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers under way are compared with the table when it is new."""
    now = datetime.now(UTC)
    passed_s = now.timestamp() % 86_400
    monkeypatch.setattr("gateway.proxy.access.auth._DAY_S", passed_s + 1.5)
    store, keys = Store(tmp_path / "fitserve.db"), Keys(Secret("k" * 40), None)
    tables: queue.Queue[KeyTable] = queue.Queue()
    ring = Keyring(
        store,
        tmp_path,
        keys,
        lambda: tables.put(keys.table),
        budget_book(store, tmp_path),
    )
    ring.add(Grant(name="a", expires=now.date()))
    first_table = tables.get(timeout=hang_s())
    assert tables.get(timeout=hang_s()) is not first_table
    expired_key = next(key for key in keys.table.keys.values() if key.name == "a")
    assert expired_key.has_ended()
    assert not keys.allows(expired_key, "inference")
    ring.close()
    store.close()


def test_keys_that_cannot_be_read_leave_the_gateway_closed(tmp_path: Path) -> None:
    store = Store(tmp_path / "fitserve.db")
    ring = Keyring(store, tmp_path, Keys(None, None), lambda: None, budget_book(store, tmp_path))
    ring.add(Grant(name="a", scopes=("admin",)))
    ring.close()
    with store._database.change() as database:
        database.execute("UPDATE keys SET may=json_set(may, '$.scopes', json('[]'))")
    store.close()
    for has_file in (True, False):
        store, keys = Store(tmp_path / "fitserve.db"), Keys(None, None)
        ring = Keyring(store, tmp_path, keys, lambda: None, budget_book(store, tmp_path))
        if not has_file:
            (tmp_path / "keys.json").unlink()
        ring.load()
        assert not keys.is_open
        assert len(ring.stored_keys) == has_file
        ring.close()
        store.close()


def test_a_changed_group_gives_people_its_budget_at_once(tmp_path: Path) -> None:
    store, keys = Store(tmp_path / "fitserve.db"), Keys(Secret("k" * 40), None)
    changes: list[None] = []
    ring = Keyring(
        store, tmp_path, keys, lambda: changes.append(None), budget_book(store, tmp_path)
    )

    def owners(name: str) -> list[str]:
        (key,) = (key for key in keys.table.keys.values() if key.name == name)
        return [budget.owner for budget in key.limit.budgets] if key.limit is not None else []

    for name, groups in (("user:ann", {"team", "ops"}), ("user:bob", {"else"})):
        budgets = ring.person_budgets(name, groups)
        keys.open_session(name, frozenset({"inference"}), time.time() + 60, budgets)
    ring.set_group("team", Allowance(requests_per_day=3))
    assert owners("user:ann") == ["group team"]
    assert owners("user:bob") == []
    ring.set_group("ops", Allowance(tokens_per_day=9))
    assert owners("user:ann") == ["group ops", "group team"]
    count = len(changes)
    ring.remove_group("team")
    assert owners("user:ann") == ["group ops"]
    assert len(changes) > count
    # A group that changes between the look at the budgets and the new key.
    budgets = ring.person_budgets("user:cleo", {"late"})
    ring.set_group("late", Allowance(requests_per_day=3))
    keys.open_session("user:cleo", frozenset({"inference"}), time.time() + 60, budgets)
    assert owners("user:cleo") == []
    ring.refresh_person("user:cleo")
    assert owners("user:cleo") == ["group late"]
    ring.close()
    store.close()
