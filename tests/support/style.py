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
