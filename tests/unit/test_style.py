"""The rules of style.toml, each of which a test holds."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT
from tests.support.style import hold, style_document

RULE = re.compile(r"\bhold\(\s*\"(\w+)\"")


def test_each_rule_is_held_by_a_test_and_says_a_better_form() -> None:
    texts = [path.read_text() for path in (ROOT / "tests" / "unit").glob("test_*.py")]
    rules = style_document()["rules"]
    assert {rule for text in texts for rule in RULE.findall(text)} == set(rules)
    assert [rule for rule, entry in rules.items() if set(entry) != {"rule", "better"}] == []


def test_a_failure_prints_its_rule_and_a_better_form() -> None:
    with pytest.raises(pytest.fail.Exception) as failure:
        hold("hint", ["gateway/errors.py:1: Correct it."])
    lines = str(failure.value).splitlines()
    assert lines[0] == style_document()["rules"]["hint"]["rule"]
    assert lines[1].startswith("Better: ")
    assert lines[2] == "gateway/errors.py:1: Correct it."
    hold("hint", [])
