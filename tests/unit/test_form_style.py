"""The form of statements: conditions and calls that a reader understands in one pass."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

import pytest

from tests.support.paths import ROOT
from tests.support.style import hold, word_list
from tests.support.syntax import functions, named_files, nodes_of, package_files, place

FILES = package_files()
MANY_VALUES = 5


def nested_conditions(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """The lines of conditional expressions with another one as a part."""
    for node in nodes:
        match node:
            case (
                ast.IfExp(test=ast.IfExp(), lineno=line)
                | ast.IfExp(body=ast.IfExp(), lineno=line)
                | ast.IfExp(orelse=ast.IfExp(), lineno=line)
            ):
                yield line


def bare_values(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """The lines of calls with a value without a meaning among many positional ones."""
    for node in nodes:
        match node:
            case ast.Call(args=values, lineno=line) if len(values) >= MANY_VALUES:
                if any(map(is_bare, values)):
                    yield line


def is_bare(value: ast.expr) -> bool:
    match value:
        case ast.Constant(value=bool() | None) | ast.Tuple(elts=[]):
            return True
    return False


def test_no_conditional_expression_has_another_one_as_a_part() -> None:
    hold(
        "nested_condition",
        [place(path, line) for path in named_files() for line in nested_conditions(nodes_of(path))],
    )


def test_a_bare_value_among_many_has_a_keyword() -> None:
    hold(
        "bare_value",
        [place(path, line) for path in named_files() for line in bare_values(nodes_of(path))],
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


MAX_LINES = 60
MANY_PARAMETERS = 8
MAX_WIDE_FUNCTIONS = 7


def test_every_function_fits_on_a_screen() -> None:
    sizes = {
        f"{place(path, node.lineno)}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path, node in functions()
    }
    hold(
        "function_length", {name: size for name, size in sizes.items() if size > MAX_LINES}.items()
    )


def test_few_functions_have_many_parameters() -> None:
    wide = []
    for path, node in functions():
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
        names = names[names[:1] in (["self"], ["cls"]) :] + [
            arg.arg for arg in node.args.kwonlyargs
        ]
        if len(names) >= MANY_PARAMETERS:
            wide.append(f"{place(path, node.lineno)}: {node.name} has {len(names)}")
    assert len(wide) <= MAX_WIDE_FUNCTIONS, "\n".join(wide)


def folded_tuples(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and text of each statement that assigns several values over several lines, and of each
    row that is unpacked where its elements could stand."""
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Tuple()], value=ast.Tuple()):
                if node.end_lineno != node.lineno:
                    yield node.lineno, ast.unparse(node.targets[0])
            case ast.Starred(value=ast.Tuple(elts=[_, *_]) | ast.List(elts=[_, *_])):
                yield node.lineno, ast.unparse(node)


def test_a_statement_assigns_one_value_and_rows_are_flat() -> None:
    files = [*FILES, *sorted((ROOT / "tests").rglob("*.py"))]
    hold(
        "one_assignment",
        [
            f"{place(path, line)}: {text}"
            for path in files
            for line, text in folded_tuples(nodes_of(path))
        ],
    )


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("a, b = (\n    1,\n    2,\n)", 1),
        ("a = (*('b', 'c'), *('d',))", 2),
        ("a, b = 1, 2", 0),
        ("a, b = pair(\n    1,\n)", 0),
        ("a = (*b, 'c')", 0),
    ],
)
def test_a_folded_tuple_is_found(source: str, count: int) -> None:
    assert len([*folded_tuples(ast.walk(ast.parse(source)))]) == count


# Calls with variadic parameters, and tables of layers and of drafters.
MAX_POSITIONAL_CALLS = 44


def test_few_calls_have_six_arguments_without_names() -> None:
    calls = [
        f"{place(path, node.lineno)}: {ast.unparse(node.func)}"
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and len(node.args) >= 6
    ]
    assert len(calls) <= MAX_POSITIONAL_CALLS, "\n".join(calls)


def test_every_function_of_tests_fits_on_a_screen_or_is_a_table() -> None:
    large_names = {
        node.name
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (node.end_lineno or 0) - node.lineno + 1 > MAX_LINES
    }
    assert large_names == word_list("large_test_functions")
