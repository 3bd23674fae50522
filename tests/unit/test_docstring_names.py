"""Names in backticks, in docstrings and comments of the package, exist in its code."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.style import hold, word_list
from tests.support.syntax import comments, docstrings, nodes_of, package_files, place, text_of

# `name`, `module.name` and `name()`.
NAME = re.compile(r"`([A-Za-z_][\w.]*)(?:\(\))?`")
WORD = re.compile(r"\w+")
FILE_SUFFIXES = frozenset({"css", "js", "json", "md", "py", "toml", "yaml"})


def names_of_code(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Every identifier of a module, and the words of its strings, without its docstrings."""
    nodes = tuple(nodes)
    texts = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        for field in ("id", "attr", "name", "arg", "asname", "module"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield from name.split(".")
        match node:
            case ast.Constant(value=str(text)) if id(node) not in texts:
                yield from WORD.findall(text)


@cache
def known_names() -> frozenset[str]:
    """The names of the package's code, modules and folders, and of the language."""
    paths = [path.relative_to(ROOT) for path in package_files()]
    return frozenset(
        {
            *(name for path in package_files() for name in names_of_code(nodes_of(path))),
            *(part.removesuffix(".py") for path in paths for part in path.parts),
            *dir(builtins),
            *keyword.kwlist,
        }
    )


def class_members(nodes: Iterable[ast.AST]) -> dict[str, set[str]]:
    """The methods, fields and attributes of each class, and the names of its bases."""
    return {
        node.name: {
            *own_members(node),
            *(ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases),
        }
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }


def own_members(class_node: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(class_node):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                yield name


@cache
def members() -> Mapping[str, set[str]]:
    """The members of each class of the package."""
    nodes = (node for path in package_files() for node in nodes_of(path))
    return class_members(nodes)


def has_member(name: str, member: str, classes: Mapping[str, set[str]]) -> bool:
    """Whether a class, or one of its bases, has the member; True of other names."""
    return (
        name not in classes
        or member in classes[name]
        or any(
            has_member(base, member, classes)
            for base in classes[name]
            if base in classes and base != name
        )
    )


def unknown_names(
    text: str, names: frozenset[str], classes: Mapping[str, set[str]]
) -> Iterator[str]:
    """The names in backticks that have a part outside of the code, or no such member."""
    for name in NAME.findall(text):
        owner, *parts = [part for part in name.split(".") if part]
        if parts and parts[-1] in FILE_SUFFIXES:
            continue
        if not names.issuperset([owner, *parts]) or (
            parts and not has_member(owner, parts[0], classes)
        ):
            yield name


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring and comment of a module."""
    yield from docstrings(nodes_of(path))
    yield from comments(text_of(path))


def test_a_name_in_a_docstring_exists_in_the_code() -> None:
    names = known_names() | word_list("foreign_names")
    hold(
        "docstring_name",
        [
            f"{place(path, line)}: {name}"
            for path in package_files()
            for line, text in texts_of(path)
            for name in unknown_names(text, names, members())
        ],
    )


def test_each_foreign_name_is_used_and_foreign() -> None:
    used_names = {
        part
        for path in package_files()
        for _, text in texts_of(path)
        for name in NAME.findall(text)
        for part in name.split(".")
    }
    assert sorted(word_list("foreign_names") - used_names) == []
    assert sorted(word_list("foreign_names") & known_names()) == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("A `plan` and `Plan.rank` of `plan.py`, `rank()`.", []),
        ("A `forecast`, and `Plan.plan` of `notes.md`.", ["forecast", "Plan.plan"]),
        ("The base has it: `Choice.rank`, not `Choice.plan`.", ["Choice.plan"]),
        ("Code such as `rank + 1` and `--rank`.", []),
    ],
)
def test_an_unknown_name_is_found(text: str, names: list[str]) -> None:
    source = "class Plan:\n    rank: int\nclass Choice(Plan): ..."
    classes = class_members(ast.walk(ast.parse(source)))
    code_names = frozenset({"plan", "Plan", "Choice", "rank"})
    assert list(unknown_names(text, code_names, classes)) == names


def test_the_names_of_code_are_identifiers_and_words_of_strings() -> None:
    source = '"""A `told`."""\nimport a.b as c\nd = e.f(g="two words")\nclass h: ...\n'
    assert {*names_of_code(ast.walk(ast.parse(source)))} == {*"abcdefgh", "two", "words"}
