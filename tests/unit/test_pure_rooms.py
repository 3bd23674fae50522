"""Decisions are pure: the modules of the pure rooms reach no file, clock, randomness, network or
log."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.syntax import tree_of

# A room or folder, and the folders below it that touch the world.
PURE = {
    "planner": ("service",),
    "diagnosis": (),
    "engines": ("inquiry", "inside"),
    "models": ("catalog",),
    "controller/decisions": (),
}
MODULES = sorted(
    path
    for room, effects in PURE.items()
    for path in (ROOT / "gateway" / room).rglob("*.py")
    if not {*effects} & {*path.relative_to(ROOT / "gateway" / room).parts}
)
LIBRARY = {
    "ast",
    "bisect",
    "__future__",
    "collections",
    "dataclasses",
    "difflib",
    "enum",
    "fnmatch",
    "functools",
    "hashlib",
    "zlib",
    "itertools",
    "json",
    "math",
}
LIBRARY |= {"contextlib", "re", "string", "types", "typing", "pydantic"}
OURS = (
    "gateway.domain",
    "gateway.errors",
    "gateway.secret",
    "gateway.variables",
    *(f"gateway.{room.replace('/', '.')}" for room in PURE),
)
EFFECTS = tuple(
    f"gateway.{room.replace('/', '.')}.{folder}"
    for room, effects in PURE.items()
    for folder in effects
)
# The registry names the rules of each kind, which are imported on demand.
LOADERS = {("gateway/engines/kind_rules.py", "import of importlib")}
CALLS = {"open", "print", "input", "exec", "eval", "compile", "__import__", "breakpoint"}


def impurities(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                modules = [name.name for name in names]
            case ast.ImportFrom(module="gateway", names=names):
                modules = [f"gateway.{name.name}" for name in names]
            case ast.ImportFrom(module=module, level=level):
                modules = [module if module and not level else "a relative module"]
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                modules = []
                yield f"{name}()"
            case ast.Name(id="__builtins__"):
                modules = []
                yield "__builtins__"
            case _:
                modules = []
        for module in modules:
            is_own = _is_within(module, OURS) and not _is_within(module, EFFECTS)
            if not is_own and module.partition(".")[0] not in LIBRARY:
                yield f"import of {module}"


def _is_within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT / "gateway")))
def test_a_decision_uses_no_clock_no_files_and_no_randomness(path: Path) -> None:
    impurity_list = list(impurities(tree_of(path)))
    assert [
        impurity
        for impurity in impurity_list
        if (str(path.relative_to(ROOT)), impurity) not in LOADERS
    ] == []


@pytest.mark.parametrize(
    "code",
    [
        "import os",
        "import os.path",
        "def f():\n    from time import time",
        "import json, socket",
        "from gateway.store.store import Store",
        "from gateway import store",
        "from . import plan",
        "from gateway.plannerlib import x",
        "from gateway.planner.service import offline",
        "import logging",
        "x = [print(1)]",
        "def f():\n    return open('x')",
    ],
)
def test_an_access_to_the_outside_is_noticed(code: str) -> None:
    assert len(list(impurities(ast.parse(code)))) == 1


def test_every_pure_room_is_looked_at() -> None:
    assert {"decide.py", "attention.py", "reconcile.py", "diagnose.py"} <= {
        path.name for path in MODULES
    }
