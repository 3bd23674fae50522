"""The lines of docstrings that explain parameters and fields."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.style import hold
from tests.support.syntax import (
    DEFINITIONS,
    definitions,
    docstrings,
    nodes_of,
    package_files,
    place,
    sentence_files,
)

FILES = package_files()

EXPLANATION_FRAGMENT = re.compile(
    r"[a-z_]\w*(?:, [a-z_]\w*)*: "
    r"(?:of|by|at|in|for|from|as|to|with|without|on|since|before|after|if|when|where|which|between"
    r"|among|below|behind|beside|besides|only|also)\b(?!:)"
)
# A line of a docstring that explains a name: "size: bytes of the body".
EXPLANATION = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): \S")
# The meaning of a parameter comes before that of its missing value.
MISSING_MEANING = re.compile(r"\b\w+`?: None: ")
# The names that a docstring explains: `a: ...`, `a, b: ...`.
PARAMETERS = re.compile(
    r"(?:^|(?<=[.;!?)\"`] ))(`?\w+`?(?:(?:, | and )`?\w+`?)*)(?: None| False| True)?: "
)
PARAMETER = re.compile(r"\w+")


def fragments_of_explanations(docstring: str) -> Iterator[str]:
    """The lines of a docstring that explain a name by a phrase without a noun."""
    previous = ""
    for line in docstring.splitlines():
        begins = not previous or previous.endswith((".", ":"))
        if begins and EXPLANATION_FRAGMENT.match(line.strip()):
            yield line.strip()
        previous = line.strip()


def test_each_explanation_of_a_name_begins_with_a_noun() -> None:
    hold(
        "explanation_noun",
        [
            f"{place(path, line)}: {row}"
            for path in sentence_files()
            for line, text in docstrings(nodes_of(path))
            for row in fragments_of_explanations(text)
        ],
    )


@pytest.mark.parametrize(
    ("docstring", "rows"),
    [
        ("size: of the body.", ["size: of the body."]),
        ("A body.\n\n    size: bytes of it.\n    hub: at a commit.", ["hub: at a commit."]),
        ("a, b: only here.", ["a, b: only here."]),
        ("A body with a\n    size: of no use.", []),
        ("size: bytes.\n    on: for each.", ["on: for each."]),
        ("on: the time. before: a time.", []),
    ],
)
def test_an_explanation_without_a_noun_is_found(docstring: str, rows: list[str]) -> None:
    assert list(fragments_of_explanations(docstring)) == rows


def explained_names(docstring: str) -> Iterator[tuple[list[str], bool]]:
    """The names of each explanation, and whether a blank line parts it from the one before."""
    is_behind_explanation = is_parted = False
    previous = ""
    for line in docstring.splitlines():
        match = EXPLANATION.match(line)
        if match and (not previous or previous.endswith((".", ":"))):
            yield match[1].split(", "), is_behind_explanation and is_parted
            is_behind_explanation, is_parted = True, False
        elif not line:
            is_parted = True
        elif is_parted:
            is_behind_explanation = is_parted = False
        previous = line


# The key of a value, and answers to a question, which stand where a name does.
ANSWERS = frozenset({"empty", "none", "zeros"})
# Choices of a field and keys of a mapping that a docstring explains.
EXPLAINED_TERMS = frozenset(
    {"code_change", "code_gone", "no_other_code", "others", "plan_verified"}
    | {"sleep", "stop", "surplus"}
)
INLINE_EXPLANATION = re.compile(r"(?:^|[.;:] )([a-z]\w*(?:, [a-z]\w*)*): (?=\S)")


def known_names(node: ast.AST) -> set[str]:
    """Parameters, public attributes and methods, and terms."""
    methods = {row.name for row in ast.walk(node) if isinstance(row, DEFINITIONS)}
    packed = {
        row.arg
        for function in ast.walk(node)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for row in (function.args.vararg, function.args.kwarg)
        if row is not None
    }
    return {*parameters_of(node), *methods, *packed, *ANSWERS, *EXPLAINED_TERMS}


def wrong_explanations(path: Path) -> Iterator[str]:
    for node in nodes_of(path):
        if isinstance(node, DEFINITIONS):
            names, docstring = known_names(node), ast.get_docstring(node) or ""
            inline_names = INLINE_EXPLANATION.findall(" ".join(docstring.split()))
            for name in {name for row in inline_names for name in row.split(", ")} - names:
                yield f"{place(path, node.lineno)}: {name} names no parameter or field"
            for row, is_parted in explained_names(docstring):
                if is_parted:
                    yield f"{place(path, node.lineno)}: a blank line before {row[0]}"
                for name in set(row) - names:
                    yield f"{place(path, node.lineno)}: {name} names no parameter or field"


def test_docstrings_explain_names_that_exist() -> None:
    hold("explained_name", [row for path in FILES for row in wrong_explanations(path)])


@pytest.mark.parametrize(
    ("docstring", "names"),
    [
        ("All.\n\na: one.\nb, c: two.", [(["a"], False), (["b", "c"], False)]),
        ("All.\n\na: one.\n\nb: two.", [(["a"], False), (["b"], True)]),
        ("All.\n\na: one.\n\nMore.\n\nb: two.", [(["a"], False), (["b"], False)]),
        ("All of one\nkind: two.", []),
    ],
)
def test_the_explained_names(docstring: str, names: list[tuple[list[str], bool]]) -> None:
    assert list(explained_names(docstring)) == names


def test_each_parameter_has_a_meaning_before_none() -> None:
    hold(
        "meaning_of_none",
        [
            f"{place(path, line)}: {row[0]}"
            for path in FILES
            for line, text in docstrings(nodes_of(path))
            if (row := MISSING_MEANING.search(text))
        ],
    )


def parameters_of(node: ast.AST) -> Iterator[str]:
    """The names that a docstring may explain: parameters, fields and attributes."""
    for inner in ast.walk(node) if isinstance(node, ast.ClassDef) else [node]:
        match inner:
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                yield name
            case ast.FunctionDef(args=args) | ast.AsyncFunctionDef(args=args):
                for parameter in (*args.posonlyargs, *args.args, *args.kwonlyargs):
                    yield parameter.arg


def packed_lines(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """The lines of a docstring in which an explained parameter stands behind another."""
    names = set(parameters_of(node))
    is_behind_another = False
    for line in (ast.get_docstring(node) or "").splitlines():
        for row in PARAMETERS.finditer(line):
            if set(PARAMETER.findall(row[1])) & names:
                if is_behind_another and row.start():
                    yield line
                is_behind_another = True


def test_each_explained_parameter_begins_a_line() -> None:
    hold(
        "parameter_line",
        [
            f"{place(path, node.lineno)}: {line}"
            for path, node in definitions()
            for line in packed_lines(node)
        ],
    )


@pytest.mark.parametrize(
    ("docstring", "lines"),
    [
        ("All. a: one. b: two.", ["All. a: one. b: two."]),
        ("All.\n\n    a: one\n    of many. `b`: two.\n", ["of many. `b`: two."]),
        ("All.\n\n    a: one; b, c: two.\n", ["a: one; b, c: two."]),
        ("All. a: one.\n\n    b, c: two; none: three.\n", []),
    ],
)
def test_packed_parameters_are_found(docstring: str, lines: list[str]) -> None:
    function = ast.parse(f'def f(a, *, b, c):\n    """{docstring}"""').body[0]
    assert isinstance(function, ast.FunctionDef)
    assert list(packed_lines(function)) == lines
