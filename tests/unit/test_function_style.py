"""The names of functions and classes, which say an act or a result."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.style import PREDICATE, hold, is_participle, word_list
from tests.support.syntax import (
    DEFINITIONS,
    OPERATOR,
    definitions,
    functions,
    named_files,
    place,
    script_files,
)

FUNCTION_NAME = re.compile(r"^ *(?:async )?def (\w+)", re.MULTILINE)


def test_no_class_name_stands_twice() -> None:
    files: dict[str, list[str]] = {}
    for path, node in definitions():
        if isinstance(node, ast.ClassDef):
            files.setdefault(node.name, []).append(place(path, node.lineno))
    hold("class_name", {name: rows for name, rows in files.items() if len(rows) > 1}.items())


def test_the_name_of_a_function_or_class_can_be_searched_for() -> None:
    hold(
        "function_name",
        [
            f"{place(path, node.lineno)}: {node.name}"
            for path, node in definitions(named_files())
            if not OPERATOR.fullmatch(node.name)
            and node.name.strip("_").lower() in word_list("vague")
        ],
    )


def is_open_name(name: str) -> bool:
    """Whether the name of a function tells neither its act nor its result."""
    plain_name = name.strip("_")
    first, *_ = plain_name.lower().split("_")
    return plain_name in word_list("open_functions") or (
        first in word_list("prepositions") and plain_name not in word_list("right_prepositions")
    )


def test_a_function_is_named_by_its_act_or_its_result() -> None:
    hold(
        "function_act",
        [
            f"{place(path, node.lineno)}: {node.name}"
            for path, node in functions(named_files())
            if is_open_name(node.name)
        ],
    )


@pytest.mark.parametrize(
    ("name", "is_open"),
    [
        ("with_tag", True),
        ("_from_mirror", True),
        ("words", True),
        ("in_flight", False),
        ("add_tag", False),
        ("offer_words", False),
    ],
)
def test_an_open_name_is_found(name: str, *, is_open: bool) -> None:
    assert is_open_name(name) is is_open


def ends_in_participle(name: str) -> bool:
    """Whether a function's name is a participle, or ends in one that says nothing of a subject."""
    first, *_ = words = name.strip("_").lower().split("_")
    return (
        is_participle(words[-1])
        and first not in word_list("predicates")
        and not set(words[1:-1]) & word_list("clauses")
        and name.strip("_") not in word_list("right_participles")
    )


def names_ending_in_participles(path: Path) -> Iterator[str]:
    """The functions of a module, which is parsed where its text has such a name."""
    source = path.read_text()
    names = {
        name
        for name in FUNCTION_NAME.findall(source)
        if ends_in_participle(name) and not name.startswith("test_")
    }
    if names:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, DEFINITIONS) and node.name in names:
                yield f"{place(path, node.lineno)}: {node.name}"


def test_functions_are_named_by_verbs_and_nouns() -> None:
    hold(
        "function_participle",
        [
            row
            for path in (
                *script_files(),
                *(
                    path
                    for folder in ("gateway", "tests", "benchmarks")
                    for path in sorted((ROOT / folder).rglob("*.py"))
                ),
            )
            for row in names_ending_in_participles(path)
        ],
    )


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("muttered", True),
        ("_gave", True),
        ("keep_measured", True),
        ("list_prepared", True),
        ("is_expired", False),
        ("wait_until_drained", False),
        ("_set_stopped", False),
        ("seed", False),
        ("read", False),
        ("requests_ended", False),
        ("prepared_views", False),
    ],
)
def test_a_participle_is_recognised_in_a_name(name: str, *, wrong: bool) -> None:
    assert ends_in_participle(name) is wrong


def exception_names() -> set[str]:
    """The classes of the package that are errors, by their bases."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for _, node in definitions()
        if isinstance(node, ast.ClassDef)
    }
    names = {"Exception", "OSError", "RuntimeError", "ValueError"}
    while more := {name for name, of in bases.items() if of & names} - names:
        names |= more
    return names


def returned_names(annotation: ast.expr | None) -> set[str]:
    """The types of a returned value, without None."""
    return set() if annotation is None else {*ast.unparse(annotation).split(" | ")} - {"None"}


def test_a_function_that_makes_an_error_says_so() -> None:
    errors = exception_names()
    makers = [
        (path, node)
        for path, node in functions()
        if (types := returned_names(node.returns)) and types <= errors
    ]
    assert len(makers) > 50
    hold(
        "error_maker",
        [
            f"{place(path, node.lineno)}: {node.name}"
            for path, node in makers
            # A refusal makes copies of itself.
            if not node.name.endswith("_error") and returned_names(node.returns) != {"RefusalError"}
        ],
    )


def is_statement_of_bool(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the docstring of a function says "Whether ..."; an act says "Returns whether"."""
    return (ast.get_docstring(node) or "").startswith("Whether")


def test_a_function_that_tells_whether_is_a_predicate() -> None:
    hold(
        "predicate",
        [
            f"{place(path, node.lineno)}: {node.name}"
            for path, node in functions()
            if node.returns is not None and ast.unparse(node.returns) == "bool"
            if is_statement_of_bool(node)
            if not PREDICATE.match(node.name) and not OPERATOR.fullmatch(node.name)
        ],
    )
