"""Rules and word lists of the style tests, from tests/unit/style.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import pytest

from tests.support.paths import ROOT

FILE = ROOT / "tests" / "unit" / "style.toml"
CODE = re.compile(r"`[^`]*`")
# A name that reads as a question: `is_ready`, `has_plan`, `waits_for_request`, `keeps_alive`.
PREDICATE = re.compile(r"_*(?:is|are|was|has|have|had|can|may|must|[a-z]+s|include)(?:_|$)")
# A clause that names nothing: "what it needs", "who asks". An infinitive is none ("what to do").
VAGUE_CLAUSE = re.compile(r"\b(?:[Ww]hat|[Ww]ho)\b(?! to \w).{0,60}")
VAGUE_SUBJECT = re.compile(r"(?:^|[.!?:] )((?:Who|What)(?:ever)?\b.{0,60})")
QUOTATION = re.compile(r"`[^`]*`|\"[^\"]*\"")


@cache
def style_document() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text())


@cache
def word_list(name: str) -> frozenset[str]:
    """The words of a list."""
    return frozenset(style_document()["words"][name].split())


def hold(rule: str, faults: Iterable[object]) -> None:
    """Fail with the rule, a better form and every fault, if there is one."""
    if rows := [str(fault) for fault in faults]:
        entry = style_document()["rules"][rule]
        lines = [entry["rule"], f"Better: {entry['better']}", *rows, f"Rule {rule} of {FILE.name}."]
        pytest.fail("\n".join(lines), pytrace=False)


def foreign_wordings(text: str) -> Iterator[str]:
    """The words of a text, outside of code, that have a plainer form, with its choices."""
    plain_text = CODE.sub("", " ".join(text.split()))
    for pattern, choices in style_document()["wording"].items():
        if match := re.search(pattern, plain_text):
            yield f"{plain_text[max(0, match.start() - 30) : match.end() + 30]} -> {choices}"


def vague_clause(text: str) -> str | None:
    """The first clause of a text, outside of code and quotations, that begins with "who" or
    "what"."""
    plain_text = QUOTATION.sub("", " ".join(text.split()))
    match = VAGUE_SUBJECT.search(plain_text) or VAGUE_CLAUSE.search(plain_text)
    return match[0].strip() if match else None


def is_participle(word: str) -> bool:
    return (
        len(word) > 3 and word.endswith("ed") and word not in word_list("no_participles")
    ) or word in word_list("irregular_participles")
