"""The first lines of docstrings: purposes, results and acts."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator

import pytest

from tests.support.style import hold, style_document, word_list
from tests.support.syntax import (
    DEFINITIONS,
    definitions,
    docstrings,
    functions,
    nodes_of,
    package_files,
    place,
    tree_of,
)

FILES = package_files()

MAX_WORDS = 20
# A call in a row of a module docstring: `read_plan(text)`, `clock.step_s(...)`. No page of a manual
# (`sd_notify(3)`) and no code in backticks.
CALL = re.compile(r"(\w+\.)?\b([A-Za-z_]\w*)\((?!\d\))")
CODE = re.compile(r"`[^`]*`")
# A class is named by its purpose, not by its users, and a sentence begins with a capital letter,
# except for the name of a program.
PURPOSE = re.compile(r"(?!(?:Shared|Used) by\b)(?:[A-Z0-9]|vLLM\b|uv\b)")
# A docstring below an attribute that only continues the attribute's name.
NO_SUBJECT = re.compile(r"(?:Of|For|By|In|On|As|At|From|To|With|Without)\b")
# A fragment as a docstring of a function or class: "The same without x", "Of one run".
FRAGMENT = re.compile(
    r"(?:Of|For|By|In|On|As|At|From|To|With|Without|That|Which|Where|Also|The same)\b"
    r"(?! machine (?:as|of))"
)
# These words follow a plural noun: "Ends of numbers", "Answers within the limit".
NOUN_PHRASE = re.compile(
    r"(?:as|at|behind|by|for|from|in|of|on|over|per|that|to|with|within|without|a|are|`\w+`)\b"
)


def test_every_module_has_a_short_description() -> None:
    first = {
        place(path, 1): (ast.get_docstring(tree_of(path)) or "").partition("\n\n")[0]
        for path in FILES
    }
    hold(
        "module_docstring",
        [name for name, text in first.items() if not 0 < len(text.split()) <= MAX_WORDS],
    )


def names_of(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The functions and classes of a module, and the names that it imports."""
    for node in nodes:
        if isinstance(node, DEFINITIONS):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)


def calls(docstring: str) -> Iterator[tuple[str, str]]:
    """The owner, if any, and the name of each call that a module docstring lists."""
    return ((row[1] or "", row[2]) for row in CALL.finditer(CODE.sub("", docstring)))


def test_each_call_in_a_module_docstring_exists() -> None:
    """A name behind an owner may be of another module."""
    names = {name for path in FILES for name in names_of(nodes_of(path))}
    hold(
        "docstring_call",
        [
            f"{place(path, 1)}: {name}"
            for path in FILES
            for owner, name in calls(ast.get_docstring(tree_of(path)) or "")
            if name not in (names if owner else names_of(nodes_of(path)))
        ],
    )


@pytest.mark.parametrize(
    ("docstring", "expected_calls"),
    [
        ("Rows.\n\n    read(path) -> str\n", [("", "read")]),
        ("clock = Clock(work)\nclock.step_s(...)", [("", "Clock"), ("clock.", "step_s")]),
        ("Source: sd_notify(3), `ServerArgs(...)`, 2x(8xh100), a list (of three).", []),
    ],
)
def test_the_calls_of_a_docstring_are_found(
    docstring: str, expected_calls: list[tuple[str, str]]
) -> None:
    assert list(calls(docstring)) == expected_calls


def test_no_class_docstring_ends_in_a_fragment() -> None:
    """A sentence needs a verb: "One object per gateway." has none."""
    hold(
        "class_verb",
        [
            f"{place(path, node.lineno)}: {text}"
            for path, node in definitions()
            if isinstance(node, ast.ClassDef)
            and (text := ast.get_docstring(node))
            and re.search(r"\bOne (?:object|instance) per\b", text)
        ],
    )


def test_each_class_docstring_begins_with_its_purpose() -> None:
    hold(
        "class_purpose",
        [
            f"{place(path, node.lineno)}: {text}"
            for path, node in definitions()
            if isinstance(node, ast.ClassDef)
            and (text := ast.get_docstring(node))
            and not PURPOSE.match(text)
        ],
    )


def attribute_docstrings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring below an attribute, a field or a constant."""
    for node in nodes:
        if isinstance(node, (ast.Module, *DEFINITIONS)):
            for above, row in itertools.pairwise(node.body):
                if isinstance(above, ast.Assign | ast.AnnAssign):
                    yield from docstrings([row])


def test_each_attribute_docstring_has_a_subject() -> None:
    hold(
        "docstring_subject",
        [
            f"{place(path, line)}: {text}"
            for path in FILES
            for line, text in attribute_docstrings(nodes_of(path))
            if NO_SUBJECT.match(text)
        ],
    )


def test_each_docstring_has_a_subject() -> None:
    hold(
        "docstring_subject",
        [
            f"{place(path, node.lineno)}: {text[:50]}; begin with a noun or a verb"
            for path, node in definitions()
            if FRAGMENT.match(text := ast.get_docstring(node) or "")
        ],
    )


def test_the_attribute_docstrings_of_a_module_are_found() -> None:
    source = 'A = 1\n"""Of a."""\nclass B:\n    """Of b."""\n    c: int\n    """Of c."""\n'
    assert list(attribute_docstrings([*ast.walk(ast.parse(source))])) == [
        (2, "Of a."),
        (6, "Of c."),
    ]


def third_person(verb: str) -> str:
    if verb in ("do", "have"):
        return {"do": "does", "have": "has"}[verb]
    if verb.endswith("y"):
        return f"{verb[:-1]}ies"
    return f"{verb}es" if verb.endswith(("s", "sh", "ch")) else f"{verb}s"


DOCSTRING_VERBS = word_list("acts") | style_document()["retired_verbs"].keys()
THIRD_PERSONS = {third_person(verb).capitalize() for verb in DOCSTRING_VERBS} | {"Has"}


def is_third_person(docstring: str) -> bool:
    """Whether the docstring of a function begins with another form than the imperative."""
    first, _, rest = docstring.partition(" ")
    return first in THIRD_PERSONS and not NOUN_PHRASE.match(rest.lstrip())


def test_docstrings_say_the_act_or_the_result_before_the_errors() -> None:
    hold(
        "raises_last",
        [
            place(path, node.lineno)
            for path, node in functions()
            if (ast.get_docstring(node) or "").startswith("Raises")
        ],
    )


def test_docstrings_of_functions_that_act_are_imperatives() -> None:
    hold(
        "imperative",
        [
            f"{place(path, node.lineno)}: {text[:50]}; begin with the imperative"
            for path, node in functions()
            if is_third_person(text := ast.get_docstring(node) or "")
        ],
    )


@pytest.mark.parametrize(
    ("docstring", "wrong"),
    [
        ("Ends the request.", True),
        ("Has the workers end.", True),
        ("Retries once.", True),
        ("Passes the answer on.", True),
        ("End the request.", False),
        ("Ends of whole numbers.", False),
        ("Bytes of a token.", False),
    ],
)
def test_a_docstring_in_the_third_person(docstring: str, *, wrong: bool) -> None:
    assert is_third_person(docstring) is wrong


@pytest.mark.parametrize(
    ("docstring", "wrong"),
    [
        ("The same without sizes.", True),
        ("Of one run.", True),
        ("For a shell.", True),
        ("A line for a shell.", False),
        ("The plans of a run.", False),
    ],
)
def test_a_fragment_of_a_docstring_is_found(docstring: str, *, wrong: bool) -> None:
    assert (FRAGMENT.match(docstring) is not None) is wrong
