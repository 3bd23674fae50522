"""Functions of an engine that begin an interpreter for one call, and are answered by a fork."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable

import pytest

from gateway.hosts.process.prepared.inside import forked_calls

Call = Callable[[], object]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module whose function counts its own calls: the interpreters that it would begin."""
    module = types.ModuleType("engine_registry")
    module.begun_calls = []  # type: ignore[attr-defined]

    def run(function: Call) -> object:
        module.begun_calls.append(function)
        return function()

    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "engine_registry", module)
    return module


def test_a_fork_answers_and_leaves_this_process_as_it_was(module: types.ModuleType) -> None:
    pids: list[int] = []

    def look() -> tuple[int, int]:
        pids.append(1)
        return os.getpid(), os.getppid()

    forked_calls.replace_calls(["engine_registry.run"])
    pid, parent = module.run(look)
    assert pid != os.getpid()
    assert parent == os.getpid()
    assert not pids
    assert not module.begun_calls
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)


@pytest.mark.parametrize("size", [0, 5_000_000])
def test_answers_of_any_size_come_whole(module: types.ModuleType, size: int) -> None:
    forked_calls.replace_calls(["engine_registry.run"])
    assert module.run(lambda: b"x" * size) == b"x" * size


def test_the_own_function_is_called_where_the_fork_fails(
    module: types.ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    parent_pid = os.getpid()

    def only_here() -> str:
        if os.getpid() != parent_pid:
            raise OSError("not in a fork")
        return "answer"

    forked_calls.replace_calls(["engine_registry.run"])
    assert module.run(only_here) == "answer"
    assert module.begun_calls == [only_here]
    assert "not in a fork" in capfd.readouterr().err
    assert module.run(lambda: os.kill(os.getpid(), 9) if os.getpid() != parent_pid else 7) == 7


def test_a_function_that_a_version_does_not_have_is_left_out(module: types.ModuleType) -> None:
    original = module.run
    assert "zipapp" not in sys.modules
    missing = ["engine_registry.walk", "engine_registry.more.run", "zipapp.main", "run"]
    forked_calls.replace_calls(missing)
    assert module.run is original
    assert "zipapp" not in sys.modules
