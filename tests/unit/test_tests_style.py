"""The names and the forms of tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence

import pytest

from tests.support.paths import ROOT
from tests.support.style import hold, word_list
from tests.support.syntax import DEFINITIONS, OPERATOR, place, value_names

# Tests whose modules are not all described yet.
OLD_TESTS = ("tests/e2e", "tests/local/server/page")


def test_every_module_of_tests_says_its_subject() -> None:
    files = (
        path
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path.name != "__init__.py"
        if not str(path.relative_to(ROOT)).startswith(OLD_TESTS)
    )
    hold(
        "test_subject", [place(path, 1) for path in files if not path.read_text().startswith('"""')]
    )


def vague_test_values(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and name of the vague locals, parameters, fields and attributes of a module of tests;
    constants are none."""
    words = word_list("vague_locals") | word_list("vague_values")
    for line, name in value_names(nodes):
        word = name.rpartition(".")[2].strip("_")
        if (
            word in words
            and not OPERATOR.fullmatch(name)
            and name not in word_list("fixed_test_names")
        ):
            yield line, name


def vague_helpers(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and name of the functions and classes of a module of tests that name no thing."""
    words = (word_list("vague") | word_list("vague_locals")) - word_list("test_helpers")
    for node in nodes:
        if isinstance(node, DEFINITIONS) and node.name.strip("_").lower() in words:
            yield node.lineno, node.name


def test_values_of_tests_are_named_by_nouns() -> None:
    hold(
        "test_value",
        [
            f"{place(path, line)}: {name}"
            for path in sorted((ROOT / "tests").rglob("*.py"))
            for line, name in vague_test_values([*ast.walk(ast.parse(path.read_text()))])
        ],
    )


def test_helpers_of_tests_are_named_by_verbs_and_nouns() -> None:
    hold(
        "test_helper",
        [
            f"{place(path, line)}: {name}"
            for path in sorted((ROOT / "tests").rglob("*.py"))
            for line, name in vague_helpers(ast.walk(ast.parse(path.read_text())))
        ],
    )


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("one, neighbour = 1, 2", {"one"}),
        ("rows = [told for told in x]", {"told"}),
        ("class A:\n    said: str", {"A.said"}),
        ("class Choice:\n    ours: str", set()),
        ("def f(given, *, wanted_rows): pass", {"given"}),
        ("self._held = 1", {"_held"}),
        ("for name, kept in x: pass", {"kept"}),
        ("with x as (made, name): pass", {"made"}),
        ("KEPT = kept_rows = kept", set()),
    ],
)
def test_a_vague_value_of_a_test_is_found(source: str, names: set[str]) -> None:
    assert {name for _, name in vague_test_values([*ast.walk(ast.parse(source))])} == names


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def alone(): pass", {"alone"}),
        ("class Told: pass", {"Told"}),
        ("async def until(): pass", set()),
        ("def is_alone(): pass", set()),
    ],
)
def test_a_vague_helper_of_a_test_is_found(source: str, names: set[str]) -> None:
    assert {name for _, name in vague_helpers(ast.walk(ast.parse(source)))} == names


# Modules that still import from another module of tests; the others share through tests/support.
MAX_IMPORTS_OF_TESTS = 20


def test_few_modules_of_tests_import_from_another_one() -> None:
    import_line = re.compile(r"^from tests\.[\w.]*\btest_\w+ import", re.MULTILINE)
    files = [
        place(path, 1)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if import_line.search(path.read_text())
    ]
    assert len(files) <= MAX_IMPORTS_OF_TESTS, "\n".join(files)


def test_models_of_tests_are_read_with_named_fields() -> None:
    """`read_model` has eight parameters; tests/support/published.py gives them defaults."""
    files = (ROOT / "tests").rglob("*.py")
    call = re.compile(r"\bread_model[(]")
    callers = {path.name for path in files if call.search(path.read_text())}
    assert callers == {"published.py"}
