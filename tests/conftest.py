"""Shared by all tests. The folder says the tier: unit, conformance, local, contract, e2e."""

from __future__ import annotations

import gc
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import kept_work, left_processes
from tests.support.examples import examples

TIERS = ("unit", "conformance", "local", "contract", "e2e")
HERE = Path(__file__).parent
# SHARD=1/2 runs the first half of the test files, SHARD=2/2 the second.
SHARD, SHARDS = map(int, os.environ.get("SHARD", "1/1").split("/"))

# How long an example takes says nothing on a busy machine.
settings.register_profile(
    "patient",
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")
left_processes.watch()
kept_work.keep()


def shard_of(path: str, shards: int) -> int:
    """The part, from 1, that a file below tests/ belongs to. It stays there when others come and
    go. Without the lowest bit of the checksum two parts take the same time."""
    return zlib.crc32(path.encode()) // 2 % shards + 1


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of the other shards, and with `-m TIER` the folders of other tiers: the
    import of openai and anthropic alone takes seconds."""
    path = collection_path.relative_to(HERE).as_posix() if HERE in collection_path.parents else ""
    if path.endswith(".py") and shard_of(path, SHARDS) != SHARD:
        return True
    tiers = set(str(config.option.markexpr).split()) - {"or"}
    is_deselected = collection_path.parent == HERE and collection_path.name in set(TIERS) - tiers
    return True if is_deselected and tiers and tiers <= set(TIERS) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(item.path.relative_to(HERE).parts[0])


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def pytest_collection_finish() -> None:
    """Objects of collection live to the end: the garbage collector need not look at it after every
    test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def kept_to_the_end() -> Iterator[None]:
    """So do modules that a module's tests have imported: they would be looked at after every later
    test, a quarter of a second each time."""
    yield
    gc.collect()
    gc.freeze()


def changed_variables(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The names of variables that differ, but for the one that pytest sets for each test."""
    names = {name for name, _ in before.items() ^ after.items()}
    return sorted(names - {"PYTEST_CURRENT_TEST"})


@pytest.fixture(autouse=True)
def unchanged_environment() -> Iterator[None]:
    """Fail a test that leaves variables changed, and restore them: settings of one test would hold
    in all later ones."""
    before = dict(os.environ)
    yield
    names = changed_variables(before, os.environ)
    for name in names:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert not names, (
        f"the test left variables changed: {', '.join(names)}. Set them with monkeypatch.setenv, or"
        " pass an environment to the code under test."
    )


@pytest.fixture(autouse=True)
def blamed_for_what_it_leaves(request: pytest.FixtureRequest) -> Iterator[None]:
    """A socket or process that a test leaves is told at the end of that very test, not in whichever
    comes later: a socket warns when it is collected."""
    yield
    if request.path.relative_to(HERE).parts[0] not in ("unit", "conformance"):
        gc.collect()
        processes = left_processes.remaining()
        assert not processes, f"the event loop ended before {', '.join(processes)}"
