"""The form of statements: conditions and calls that a reader understands in one pass."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

import pytest

from tests.support.style import hold
from tests.support.syntax import nodes_of, package_files, place, script_files

FILES = (*package_files(), *script_files())
MANY_VALUES = 5


def nested_conditions(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """The lines of conditional expressions with another one as a part."""
    for node in nodes:
        match node:
            case (
                ast.IfExp(test=ast.IfExp())
                | ast.IfExp(body=ast.IfExp())
                | ast.IfExp(orelse=ast.IfExp())
            ):
                yield node.lineno


def bare_values(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """The lines of calls with a value without a meaning among many positional ones."""
    for node in nodes:
        values = node.args if isinstance(node, ast.Call) else []
        if len(values) >= MANY_VALUES and any(map(is_bare, values)):
            yield node.lineno


def is_bare(value: ast.expr) -> bool:
    match value:
        case ast.Constant(value=bool() | None) | ast.Tuple(elts=[]):
            return True
    return False


def test_no_conditional_expression_has_another_one_as_a_part() -> None:
    hold(
        "nested_condition",
        [place(path, line) for path in FILES for line in nested_conditions(nodes_of(path))],
    )


def test_a_bare_value_among_many_has_a_keyword() -> None:
    hold(
        "bare_value", [place(path, line) for path in FILES for line in bare_values(nodes_of(path))]
    )


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("a if b else c if d else e", [1]),
        ("(a if b else c) if d else e", [1]),
        ("\na if (b if c else d) else e", [2]),
        ("f(a if b else c) if d else e", []),
        ("a if b else c", []),
    ],
)
def test_a_nested_condition_is_found(source: str, lines: list[int]) -> None:
    assert list(nested_conditions(ast.walk(ast.parse(source)))) == lines


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("f(a, b, c, d, True)", [1]),
        ("f(a, b, (), c, d)", [1]),
        ("f(*a, b, None, c, d)", [1]),
        ("f(a, b, c, d, e, x=True)", []),
        ("f(a, b, c, True)", []),
        ("f(a, b, c, d, (1,))", []),
    ],
)
def test_a_bare_value_is_found(source: str, lines: list[int]) -> None:
    assert list(bare_values(ast.walk(ast.parse(source)))) == lines
