"""The glossary of verbs, one meaning for each, and classes that end in a noun."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.paths import ROOT
from tests.support.style import hold, style_document, word_list
from tests.support.syntax import nodes_of, package_files

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# The last word of a name in camel case.
LAST_WORD = re.compile(r"[A-Z][a-z0-9]*$")


def first_word(name: str) -> str:
    return name.strip("_").partition("_")[0]


def is_retired(name: str) -> bool:
    """Whether a function's name begins with an everyday verb that has several meanings."""
    return first_word(name) in style_document()["retired_verbs"] and name.strip(
        "_"
    ) not in word_list("right_verbs")


def function_names() -> list[tuple[str, str]]:
    """The place and the name of each function of the package."""
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno}", node.name)
        for path in package_files()
        for node in nodes_of(path)
        if isinstance(node, FUNCTIONS)
    ]


def test_no_function_begins_with_a_verb_of_several_meanings() -> None:
    hold(
        "retired_verb", [f"{place}: {name}" for place, name in function_names() if is_retired(name)]
    )


def test_each_verb_of_the_glossary_is_used() -> None:
    verbs = {first_word(name) for _, name in function_names()}
    assert style_document()["glossary"].keys() - verbs == set()


def test_each_allowed_name_of_a_retired_verb_exists() -> None:
    names = {name.strip("_") for _, name in function_names()}
    assert word_list("right_verbs") - names == set()


def test_a_retired_verb_is_in_no_list_of_good_verbs() -> None:
    document = style_document()
    retired_verbs = document["retired_verbs"].keys()
    assert retired_verbs & (document["glossary"].keys() | word_list("acts")) == set()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_note_failure", True),
        ("keep", True),
        ("keeper", False),
        ("keep_alive_s", False),
        ("record_failure", False),
        ("ending", False),
    ],
)
def test_a_retired_verb_is_recognised(name: str, *, expected: bool) -> None:
    assert is_retired(name) is expected


def ends_in_participle(name: str) -> bool:
    """Whether the last word of a class name is a participle, which names no thing."""
    match = LAST_WORD.search(name)
    word = match[0].lower() if match else ""
    is_regular = len(word) > 3 and word.endswith("ed") and word not in word_list("no_participles")
    return is_regular or word in word_list("irregular_participles")


def class_names() -> list[tuple[str, str]]:
    """The place and the name of each class of the package."""
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno}", node.name)
        for path in package_files()
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
    ]


def test_class_names_end_in_nouns() -> None:
    hold(
        "class_participle",
        [
            f"{place}: {name}"
            for place, name in class_names()
            if ends_in_participle(name) and name not in word_list("right_class_participles")
        ],
    )


def test_each_allowed_participle_of_a_class_exists() -> None:
    names = {name for _, name in class_names()}
    assert word_list("right_class_participles") - names == set()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_Refuted", True),
        ("BenchKept", True),
        ("Hidden", True),
        ("RejectedPlan", False),
        ("Speed", False),
        ("StoredBench", False),
    ],
)
def test_a_participle_of_a_class_is_recognised(name: str, *, expected: bool) -> None:
    assert ends_in_participle(name) is expected
