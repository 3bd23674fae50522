"""A key that stays the same for a cache folder, so that an engine finds its compiled graphs."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.hosts.process.engine_keys import EngineKeys


def test_starts_with_one_cache_have_one_key_in_every_gateway(tmp_path: Path) -> None:
    file = tmp_path / "data" / "engine-secret"
    first_key = EngineKeys(file).key(tmp_path / "a")
    assert re.fullmatch(r"[0-9a-f]{64}", first_key.reveal())
    assert EngineKeys(file).key(tmp_path / "a") == first_key
    assert file.stat().st_mode & 0o777 == 0o600


def test_other_caches_other_data_and_starts_without_a_cache_have_other_keys(
    tmp_path: Path,
) -> None:
    engine_keys, other_keys = EngineKeys(tmp_path / "here"), EngineKeys(tmp_path / "there")
    keys = [
        engine_keys.key(tmp_path / "a"),
        engine_keys.key(tmp_path / "b"),
        other_keys.key(tmp_path / "a"),
    ]
    keys += [engine_keys.key(None), engine_keys.key(None)]
    assert len(set(keys)) == 5


def test_a_damaged_secret_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"short")
    key = EngineKeys(file).key(tmp_path / "a")
    assert EngineKeys(file).key(tmp_path / "a") == key
