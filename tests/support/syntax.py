"""Syntax trees of our modules, each parsed and walked once for all tests that read code."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT


@cache
def package_files() -> tuple[Path, ...]:
    """Every module of the package, sorted by its path."""
    return tuple(sorted((ROOT / "gateway").rglob("*.py")))


@cache
def script_files() -> tuple[Path, ...]:
    """Every Python program and module of scripts/, sorted by its path."""
    beginnings = (b"#!/usr/bin/env python3", b'"""')
    return tuple(
        path
        for path in sorted((ROOT / "scripts").iterdir())
        if path.is_file() and path.read_bytes().startswith(beginnings)
    )


@cache
def text_of(path: Path) -> str:
    """The source of a module."""
    return path.read_text()


@cache
def tree_of(path: Path) -> ast.Module:
    """The tree of a module. Tests share it, and leave it unchanged."""
    return ast.parse(text_of(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a module, in the order of `ast.walk`."""
    return tuple(ast.walk(tree_of(path)))
