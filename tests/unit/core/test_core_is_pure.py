"""Decisions are pure: the modules of gateway/core reach no file, clock, chance, network or log."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import gateway.core

CORE = sorted(Path(next(iter(gateway.core.__path__))).glob("**/*.py"))
LIBRARY = {
    "bisect",
    "__future__",
    "collections",
    "dataclasses",
    "difflib",
    "enum",
    "fnmatch",
    "functools",
    "hashlib",
    "itertools",
    "json",
    "math",
}
LIBRARY |= {"re", "string", "typing", "pydantic"}
OURS = ("gateway.domain", "gateway.errors", "gateway.core")
CALLS = {"open", "print", "input", "exec", "eval", "compile", "__import__", "breakpoint"}


def impurities(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                modules = [name.name for name in names]
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
            ours = any(module == own or module.startswith(f"{own}.") for own in OURS)
            if not ours and module.partition(".")[0] not in LIBRARY:
                yield f"import of {module}"


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_a_decision_reaches_nothing_outside(path: Path) -> None:
    assert list(impurities(ast.parse(path.read_text()))) == []


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
        "from gateway.corelib import x",
        "import logging",
        "x = [print(1)]",
        "def f():\n    return open('x')",
    ],
)
def test_what_reaches_outside_is_seen(code: str) -> None:
    assert len(list(impurities(ast.parse(code)))) == 1


def test_all_of_the_core_is_looked_at() -> None:
    assert {"decide.py", "vllm_attention.py", "reconcile.py", "diagnose.py"} <= {path.name for path in CORE}
