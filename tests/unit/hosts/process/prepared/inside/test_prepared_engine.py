"""Names of caches that a prepared process computes before its forks need them."""

from __future__ import annotations

import sys
import types

import pytest

from gateway.hosts.process.prepared.inside import prepared_engine


def test_hashes_of_imported_packages_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    package = types.ModuleType("toy_compiler")
    package.key = lambda: calls.append("key")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_compiler", package)
    names = ("toy_compiler:key", "toy_compiler:missing", "nowhere_imported:key")
    prepared_engine.cache_hashes(names)
    assert calls == ["key"]
    assert "nowhere_imported" not in sys.modules


def test_a_hash_that_fails_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("no such file")

    package = types.ModuleType("toy_compiler")
    package.key = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_compiler", package)
    prepared_engine.cache_hashes(("toy_compiler:key",))
