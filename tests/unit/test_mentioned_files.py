"""Files and tests that documents and comments mention exist; a rename without its mentions fails
here."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

from tests.support.paths import ROOT

OURS = ("docs", "gateway", "tests", "benchmarks", "scripts", "profiles")
FILES = frozenset(
    path.relative_to(ROOT).as_posix()
    for path in (
        *ROOT.glob("*.md"),
        *(path for folder in OURS for path in (ROOT / folder).rglob("*")),
    )
    if path.is_file() and path.suffix != ".pyc"
)
NAMES = frozenset(PurePosixPath(name).name for name in FILES)
# `models/` and `engines/` begin paths of engines too.
FOLDERS = sorted(
    {name.split("/")[1] for name in FILES if name.startswith("gateway/") and name.count("/") > 1}
    - {"engines", "models"}
)
# `planner/decide.py`, from the root or from within the package; not the paths of engines, which
# begin with vllm/ or sglang/.
PATH = re.compile(
    rf"(?<![\w./{{-])(?:{'|'.join((*OURS, *FOLDERS))})/[\w./-]+\.(?:py|md|yaml|json)\b"
)
MODULE = re.compile(rf"\bgateway\.(?:{'|'.join(FOLDERS)})\.[a-z_.]*[a-z_]")
ROUTE_GATEWAY = re.compile(r"^    gateway = |\bgateway: Gateway\b", re.MULTILINE)
TEST = re.compile(r"\b(tests/[\w/]+\.py)::(\w+)")
BARE = re.compile(r"`(\w+\.py)`")
# Stands for a name that varies: KIND, VERSION, NAME.
VARIES = re.compile(r"\b[A-Z]{2,}\b")

NAMED = "test_each_named_file_exists"

# The log of former states.
REWRITTEN = ("CHANGELOG.md",)


def texts() -> list[str]:
    """Documents, and files with comments: our code and profiles. The logs of engines name files of
    engines."""
    code = tuple(f"{folder}/" for folder in OURS)
    return sorted(
        name
        for name in FILES
        if name not in REWRITTEN
        and (
            (name.endswith(".md") and (name.startswith("docs/") or "/" not in name))
            or (
                name.startswith(code)
                and name.endswith((".py", ".yaml"))
                and not name.startswith("tests/logs/")
            )
        )
    )


def exists(path: str) -> bool:
    return any(name == path or name.endswith(f"/{path}") for name in FILES)


@cache
def functions_of(path: str) -> frozenset[str]:
    """Functions of a test file that pytest runs."""
    return frozenset(
        re.findall(r"^(?:async )?def (test_\w+)\(", (ROOT / path).read_text(), re.MULTILINE)
    )


def is_module(dotted: str) -> bool:
    """Whether a dotted name is a module, or a name in a module."""
    parts = dotted.split(".")
    starts = ["/".join(parts[:size]) for size in range(2, len(parts) + 1)]
    return (
        any(f"{start}.py" in FILES for start in starts)
        or exists(f"{'/'.join(parts)}/__init__.py")
        or parts[-1] == "__path__"
    )


@pytest.mark.parametrize("name", texts())
def test_each_named_file_exists(name: str) -> None:
    text = (ROOT / name).read_text()
    missing = [path for path in PATH.findall(text) if not VARIES.search(path) and not exists(path)]
    # Routes call their gateway by the package's name.
    if not ROUTE_GATEWAY.search(text):
        missing += [module for module in MODULE.findall(text) if not is_module(module)]
    missing += [bare for bare in BARE.findall(text) if bare not in NAMES]
    missing += [
        f"{path}::{test}"
        for path, test in TEST.findall(text)
        if path in FILES and test not in functions_of(path)
    ]
    assert not missing


def test_a_missing_test_is_reported() -> None:
    mentions = TEST.findall(
        f"`{Path(__file__).relative_to(ROOT)}::test_nobody_wrote` and"
        f" `tests/unit/test_mentioned_files.py::{NAMED}`"
    )
    assert [name in functions_of(path) for path, name in mentions] == [False, True]


def test_each_attack_that_is_listed_has_a_test() -> None:
    """Each list item of docs/attacks.md names a test."""
    section = (ROOT / "docs/attacks.md").read_text()
    attacks = section.split("\n* ")[1:]
    assert len(attacks) > 40
    assert [attack for attack in attacks if not TEST.search(attack)] == []
