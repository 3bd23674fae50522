"""Syntax trees of our modules, each parsed and walked once for all tests that read code."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
OPERATOR = re.compile(r"__\w+__")


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
def named_files() -> tuple[Path, ...]:
    """The files whose names are held to the words of style.toml."""
    return (*package_files(), *script_files())


@cache
def sentence_files() -> tuple[Path, ...]:
    """The modules whose docstrings and comments are checked."""
    return tuple(sorted([*named_files(), *(ROOT / "tests").rglob("*.py")]))


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


def definitions(
    files: Iterable[Path] | None = None,
) -> Iterator[tuple[Path, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function and class of these files; None: of the package."""
    return (
        (path, node)
        for path in (package_files() if files is None else files)
        for node in nodes_of(path)
        if isinstance(node, DEFINITIONS)
    )


def functions(
    files: Iterable[Path] | None = None,
) -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function of these files; None: of the package."""
    return ((path, node) for path, node in definitions(files) if not isinstance(node, ast.ClassDef))


def value_names(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and name of every local, parameter, attribute, field and constant that is set.

    A field's name stands behind that of its class.
    """
    fields = {
        row.target: f"{node.name}.{row.target.id}"
        for node in nodes
        if isinstance(node, ast.ClassDef)
        for row in node.body
        if isinstance(row, ast.AnnAssign) and isinstance(row.target, ast.Name)
    }
    operators = {
        parameter
        for node in nodes
        if isinstance(node, ast.FunctionDef) and OPERATOR.fullmatch(node.name)
        for parameter in node.args.args
        if node.name != "__init__"
    }
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store(), lineno=line):
                yield line, fields.get(node, name)
            case ast.Attribute(attr=name, ctx=ast.Store(), lineno=line):
                yield line, name
            case ast.arg(arg=name, lineno=line) if node not in operators:
                yield line, name
            case ast.MatchAs(name=str(name), lineno=line):
                yield line, name
            case ast.ExceptHandler(name=str(name), lineno=line):
                yield line, name
