"""The sentences of comments, messages, hints and descriptions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.style import foreign_wordings, hold, vague_clause
from tests.support.syntax import (
    comments,
    docstrings,
    named_files,
    nodes_of,
    package_files,
    place,
    sentence_files,
    text_of,
)

FILES = package_files()

# A fragment as the description of a field, which is a noun phrase or says "whether", "how", "why".
FIELD_FRAGMENT = re.compile(
    r"(?:of|for|by|in|on|as|at|from|to|with|without|that|those|what|who|whose|also|the same"
    r"|its?|they)\b(?! (?:least|most) \d)"
)
# Prepositions that begin no explanation of a name ("size: of the body") and no comment.
COMMENT_FRAGMENT = re.compile(
    r"(?:^|[.:] )(?:Of|Else|Also)\b|^(?:By|In|At|As|With|Without|Behind|Beside|So many)\b"
)
PRONOUN_QUESTION = re.compile(r"(?:^|[.!?:] )(Whether (?:it|they)\b.{0,60})")
# A comment behind the bracket that closes a statement, where a formatter had to break its line.
STRANDED_COMMENT = re.compile(r"^[ \t]*[)\]}](?:.*\S)?  # (?!fmt: |type: |noqa)", re.MULTILINE)


def places_of_vague_clauses(path: Path) -> Iterator[str]:
    for line, text in (*docstrings(nodes_of(path)), *comments(text_of(path))):
        if clause := vague_clause(text):
            yield f"{place(path, line)}: {clause}"


@pytest.mark.parametrize(
    ("text", "vague"),
    [
        ("Who asks is answered.", True),
        ("The answer.  What follows\nis ignored.", True),
        ("The answer: whatever it is. Whatever follows.", True),
        ("A wish, and what follows\nfrom it.", True),
        ("All who ask share it.", True),
        ("The error says what to do.", False),
        ('A field `what`, and "what it was".', False),
        ("The answer, whatever the model.", False),
        ("Whole plans. Whose?", False),
    ],
)
def test_a_vague_clause_is_found(text: str, *, vague: bool) -> None:
    assert (vague_clause(text) is not None) is vague


def test_clauses_have_nouns_as_subjects() -> None:
    files = sentence_files()
    assert {"gateway", "scripts", "tests"} == {path.relative_to(ROOT).parts[0] for path in files}
    hold("clause_subject", [clause for path in files for clause in places_of_vague_clauses(path)])


def stranded_comments(source: str) -> Iterator[int]:
    """The lines of comments that a formatter left behind a closing bracket."""
    return (source.count("\n", 0, row.start()) + 1 for row in STRANDED_COMMENT.finditer(source))


def test_no_comment_stands_behind_a_closing_bracket() -> None:
    files = [
        *(path for path in (ROOT / "scripts").iterdir() if path.is_file()),
        *(
            path
            for folder in ("gateway", "tests", "benchmarks")
            for path in (ROOT / folder).rglob("*.py")
        ),
    ]
    hold(
        "comment_place",
        [
            place(path, line)
            for path in sorted(files)
            for line in stranded_comments(path.read_text())
        ],
    )


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("a = (\n    b\n)  # why", [3]),
        ("    d: tuple[\n        str, ...\n    ] = ()  # a list", [3]),
        ("    if (\n        a\n    ):  # why", [3]),
        ("a = (\n    b\n)  # fmt: skip", []),
        ("a = (b)  # why", []),
        ("# why\na = (\n    b,  # a part\n)", []),
    ],
)
def test_a_stranded_comment_is_found(source: str, lines: list[int]) -> None:
    assert list(stranded_comments(source)) == lines


def descriptions(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and text of each description of a field."""
    for node in nodes:
        match node:
            case ast.keyword(arg="description", value=ast.Constant(value=str(text)), lineno=line):
                yield line, text


def test_each_description_has_a_subject() -> None:
    hold(
        "field_description",
        [
            f"{place(path, line)}: {text[:50]}; begin with a noun"
            for path in FILES
            for line, text in descriptions(nodes_of(path))
            if FIELD_FRAGMENT.match(text)
        ],
    )


def test_each_comment_begins_with_a_subject() -> None:
    hold(
        "comment_subject",
        [
            f"{place(path, line)}: {text[:60]}"
            for path in sentence_files()
            for line, text in comments(text_of(path))
            if COMMENT_FRAGMENT.search(text)
        ],
    )


@pytest.mark.parametrize(
    ("comment", "wrong"),
    [
        ("Of the size of a cache.", True),
        ("Without NVML the module asks torch.", True),
        ("The first counts. Of plans the longest.", True),
        ("The first of equal scopes counts.", False),
        ("Ask the engine: as a user would.", False),
    ],
)
def test_a_comment_without_a_subject_is_found(comment: str, *, wrong: bool) -> None:
    assert (COMMENT_FRAGMENT.search(comment) is not None) is wrong


def shown_texts(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and text of each string with a space: docstrings, messages, reasons and help."""
    for node in nodes:
        match node:
            case ast.Constant(value=str(text), lineno=line) if " " in text:
                yield line, text


def test_sentences_have_plain_words() -> None:
    hold(
        "wording",
        [
            f"{place(path, line)}: {row}"
            for path in (*named_files(), *sorted((ROOT / "benchmarks").rglob("*.py")))
            for line, text in (*shown_texts(nodes_of(path)), *comments(text_of(path)))
            for row in foreign_wordings(text)
        ],
    )


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("A file beside the\ndatabase, and no `offer.beside`.", 1),
        ("Requests at once are planned anew.", 2),
        ("It is no tensor.", 1),
        ("There is no tensor. It is no longer there.", 0),
        ("A file next to the database.", 0),
    ],
)
def test_a_foreign_wording_is_found(text: str, count: int) -> None:
    assert len([*foreign_wordings(text)]) == count


# A hint that only asks the user to find the step: "Correct it.", "See its log."
EMPTY_HINT = re.compile(
    r"(?:Correct|Fix|See|Check|Stop|Change) (?:it|(?:its|the|this) [\w.']+(?: log)?)"
    r"(?: first| again)?\.?"
)


def hints(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and text of each hint of an error that is a constant."""
    for node in nodes:
        match node:
            case ast.keyword(arg="hint", value=ast.Constant(value=str(text)), lineno=line):
                yield line, text


def test_hints_say_the_step() -> None:
    hold(
        "hint",
        [
            f"{place(path, line)}: {text}"
            for path in FILES
            for line, text in hints(nodes_of(path))
            if EMPTY_HINT.fullmatch(text)
        ],
    )


@pytest.mark.parametrize(
    ("hint", "empty"),
    [
        ("Correct it.", True),
        ("See the engine's log.", True),
        ("Stop it first.", True),
        ("Check the driver with `nvidia-smi`.", False),
        ("Set it to a number such as 4.", False),
    ],
)
def test_an_empty_hint_is_found(hint: str, *, empty: bool) -> None:
    (text,) = (text for _, text in hints(ast.walk(ast.parse(f"error(hint={hint!r})"))))
    assert (EMPTY_HINT.fullmatch(text) is not None) is empty


def test_no_question_has_a_pronoun_as_subject() -> None:
    files = (path for folder in ("gateway", "tests") for path in (ROOT / folder).rglob("*.py"))
    hold(
        "whether_subject",
        [
            f"{place(path, line)}: {match[1]}"
            for path in sorted(files)
            if "Whether " in path.read_text()
            for line, text in docstrings(ast.walk(ast.parse(path.read_text())))
            if (match := PRONOUN_QUESTION.search(" ".join(text.split())))
        ],
    )


@pytest.mark.parametrize(
    ("description", "wrong"),
    [
        ("the same, of tokenizers", True),
        ("of its plan", True),
        ("its memory", True),
        ("bytes of memory", False),
        ("whether the node is there", False),
    ],
)
def test_a_fragment_of_a_description_is_found(description: str, *, wrong: bool) -> None:
    nodes = ast.walk(ast.parse(f"x: int = Field(description={description!r})"))
    assert [FIELD_FRAGMENT.match(text) is not None for _, text in descriptions(nodes)] == [wrong]
