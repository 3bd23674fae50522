"""The names of values, which have a noun, and of booleans, which are predicates."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

import pytest

from tests.support.style import PREDICATE, hold, word_list
from tests.support.syntax import OPERATOR, named_files, nodes_of, package_files, place, value_names

FILES = package_files()

# Classes whose fields are part of JSON, of settings or of a message.
PUBLISHED_BASES = ("Value", "BaseModel", "Struct", "TypedDict", "OwnedCall")


def is_vague(name: str) -> bool:
    """Whether the name of a value is nothing but one of the words."""
    word = name.rpartition(".")[2]
    return not OPERATOR.fullmatch(word) and word.strip("_").lower() in word_list("vague_values")


def test_the_names_of_values_can_be_searched_for() -> None:
    hold(
        "value_name",
        [
            f"{place(path, line)}: {name}"
            for path in named_files()
            for line, name in value_names(nodes_of(path))
            if is_vague(name) and name not in word_list("published_fields")
        ],
    )


def is_open(name: str) -> bool:
    """Whether the name of a local, parameter or attribute has no noun; fields are published."""
    return "." not in name and name.strip("_") in word_list("open_values")


def test_the_names_of_locals_and_parameters_have_a_noun() -> None:
    hold(
        "value_noun",
        [
            f"{place(path, line)}: {name}"
            for path in named_files()
            for line, name in value_names(nodes_of(path))
            if is_open(name)
        ],
    )


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (
            "def f(former, *, former_plan):\n    missing = 1\n    missing_files = 2",
            {"former", "missing"},
        ),
        ("self._waiting = self._waiting_count = 1", {"_waiting"}),
        ("class A:\n    missing: int", set()),
        ("with x as best, y as best_plan: pass", {"best"}),
    ],
)
def test_names_of_values_without_a_noun(source: str, names: set[str]) -> None:
    names_by_line = value_names([*ast.walk(ast.parse(source))])
    assert {name for _, name in names_by_line if is_open(name)} == names


def test_each_published_field_exists() -> None:
    names = {name for path in FILES for _, name in value_names(nodes_of(path))}
    assert not word_list("published_fields") - names


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def f(told, *, sorted_rows):\n    held = 1\n    cached_rows = 2", {"told", "held"}),
        ("class A:\n    told: int\n    def __eq__(self, other): ...", {"A.told"}),
        ("match x:\n    case [found]: pass", {"found"}),
        ("self._seen = KEPT = 1", {"_seen", "KEPT"}),
        ("for others in [*(given for given in x)]: pass", {"others", "given"}),
    ],
)
def test_vague_names_of_values_are_found(source: str, names: set[str]) -> None:
    names_by_line = value_names([*ast.walk(ast.parse(source))])
    assert {name for _, name in names_by_line if is_vague(name)} == names


def is_boolean(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation) in ("bool", "bool | None")


def booleans_of(node: ast.ClassDef) -> Iterator[tuple[int, str]]:
    """Line and name of every field, property and attribute of a class that holds a boolean."""
    for row in node.body:
        match row:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, lineno=line):
                if is_boolean(annotation):
                    yield line, name
            case ast.FunctionDef(name=name, returns=returns, lineno=line):
                decorators = {ast.unparse(decorator) for decorator in row.decorator_list}
                if is_boolean(returns) and decorators & {"property", "cached_property"}:
                    yield line, name
    for inner in ast.walk(node):
        match inner:
            case (
                ast.Assign(targets=targets, value=ast.Constant(value=bool()), lineno=line)
                | ast.Assign(
                    targets=targets, value=ast.UnaryOp(op=ast.Not()) | ast.Compare(), lineno=line
                )
            ):
                for target in targets:
                    if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                        yield line, target.attr


def is_published(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).rpartition(".")[2] in PUBLISHED_BASES for base in node.bases)


def unclear_booleans(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and name of the booleans inside the program that read as nouns or participles."""
    for node in nodes:
        if isinstance(node, ast.ClassDef) and not is_published(node):
            for line, name in booleans_of(node):
                full_name = f"{node.name}.{name}"
                if not PREDICATE.match(name) and full_name not in word_list("boolean_terms"):
                    yield line, full_name


def test_booleans_are_named_by_predicates() -> None:
    hold(
        "boolean",
        [
            f"{place(path, line)}: {name}"
            for path in FILES
            for line, name in unclear_booleans(nodes_of(path))
        ],
    )


def unclear_parameters(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and name of the boolean parameters that read as nouns or participles."""
    for node in nodes:
        match node:
            case ast.arg(arg=name, annotation=annotation, lineno=line) if is_boolean(annotation):
                if not PREDICATE.match(name) and name not in word_list("boolean_parameters"):
                    yield line, name


def test_boolean_parameters_are_named_by_predicates() -> None:
    hold(
        "boolean",
        [
            f"{place(path, line)}: {name}"
            for path in FILES
            for line, name in unclear_parameters(nodes_of(path))
        ],
    )


def test_an_unclear_parameter() -> None:
    source = (
        "def f(tied: bool, *, is_tied: bool, keep_alive: bool, name: str, raw: bool | None): ..."
    )
    assert {name for _, name in unclear_parameters(ast.walk(ast.parse(source)))} == {"tied", "raw"}


def test_each_term_of_a_boolean_exists() -> None:
    names = {
        f"{node.name}.{name}"
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
        for _, name in booleans_of(node)
    }
    assert sorted(word_list("boolean_terms") - names) == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("class A:\n    busy: bool = False\n    is_ready: bool | None = None", {"A.busy"}),
        ("class A(Value):\n    busy: bool = False", set()),
        ("class A:\n    @property\n    def asleep(self) -> bool: ...", {"A.asleep"}),
        ("class A:\n    def f(self):\n        self._ended = self.waits = True", {"A._ended"}),
        ("class A:\n    def close(self) -> bool: ...", set()),
    ],
)
def test_an_unclear_boolean_is_found(source: str, names: set[str]) -> None:
    assert {name for _, name in unclear_booleans(ast.walk(ast.parse(source)))} == names
