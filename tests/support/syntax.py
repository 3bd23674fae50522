"""Syntax trees of our modules, each parsed and walked once for all tests that read code."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


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


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def docstrings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Every string that stands alone, with its line: docstrings, and those below a field."""
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Constant(value=str(text)), lineno=line):
                yield line, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Every block of comment lines as one text, with its first line."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        row = token.start[0]
        if block and row != last + 1:
            yield first, " ".join(block)
            block = []
        first = first if block else row
        last = row
        block.append(token.string.lstrip("# "))
    if block:
        yield first, " ".join(block)
