"""The programs of scripts/ find the names that they use of this project, and ruff finds them."""

from __future__ import annotations

import ast
import importlib
import tomllib
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.syntax import script_files

PROGRAMS = [path for path in script_files() if path.read_bytes().startswith(b"#!")]


def imported_value(module: str, name: str) -> Any:
    """The value that `from module import name` binds; None: none."""
    with suppress(ModuleNotFoundError):
        return importlib.import_module(f"{module}.{name}")
    return getattr(importlib.import_module(module), name, None)


def missing_names(path: Path) -> list[str]:
    """Names of the project's modules that the program uses and that are absent."""
    tree = ast.parse(path.read_text())
    modules: dict[str, types.ModuleType] = {}
    missing = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
            ("gateway", "tests", "benchmarks")
        ):
            continue
        for alias in node.names:
            value = imported_value(str(node.module), alias.name)
            if value is None:
                missing.append(f"{node.module}.{alias.name}")
            elif isinstance(value, types.ModuleType):
                modules[alias.asname or alias.name] = value
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if module is not None and not hasattr(module, node.attr):
                missing.append(f"{node.value.id}.{node.attr}")
    return missing


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_a_program_uses_names_that_exist(path: Path) -> None:
    assert missing_names(path) == []


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_ruff_checks_each_python_program(path: Path) -> None:
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    relative_path = path.relative_to(ROOT)
    assert path.suffix == ".py" or any(
        relative_path.match(pattern) for pattern in ruff["extend-include"]
    )
