"""A change of one key makes nothing of the others anew."""

from __future__ import annotations

from pathlib import Path

from gateway.domain.grant import Grant
from gateway.proxy.access.auth import Keys
from gateway.proxy.access.keyring import Keyring
from gateway.secret import Secret
from gateway.store.store import Store


def test_a_change_of_one_key_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    store, keys = Store(tmp_path / "fitserve.db"), Keys(Secret("k" * 40), None)
    changes: list[int] = []
    ring = Keyring(store, tmp_path, keys, lambda: changes.append(len(keys.table.keys)))
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
    second_keyring = Keyring(store, tmp_path, Keys(Secret("k" * 40), None), lambda: None)
    second_keyring.load()
    assert second_keyring.stored_keys == ring.stored_keys
    ring.close()
    store.close()
