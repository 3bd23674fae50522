"""The patience of tests on a busy machine."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.patience import slowness_of
from tests.support.syntax import nodes_of, text_of

CALLS = ("AsyncClient", "Client", "delete", "get", "head", "patch", "post", "put", "stream")


@pytest.mark.parametrize(
    ("load", "factor"),
    [
        ("0.10 0.20 0.30 1/200 77", 1.0),
        ("8.00 4.00 2.00 1/200 77", 4.0),
        # Programs that have just begun are in no mean.
        ("0.10 0.20 0.30 12/200 77", 6.0),
    ],
)
def test_waits_are_longer_by_the_programs_that_want_a_core(load: str, factor: float) -> None:
    assert slowness_of(load, 2) == factor


def httpx_calls(path: Path) -> Iterator[ast.Call]:
    """The calls of a test file that make a client of httpx, or a request without one."""
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in [
            f"httpx.{name}" for name in CALLS
        ]:
            yield node


def test_clients_state_how_long_they_wait() -> None:
    """The five seconds of httpx are too few on a busy machine."""
    files = [path for path in (ROOT / "tests").rglob("*.py") if "httpx." in text_of(path)]
    hasty_calls = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in files
        for call in httpx_calls(path)
        if "timeout" not in [keyword.arg for keyword in call.keywords]
    ]
    assert len(files) > 20
    assert hasty_calls == []
