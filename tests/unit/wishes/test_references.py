"""Values of references stand in no error, however it cuts or escapes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BadRequest
from gateway.wishes.models_file import load
from gateway.wishes.references import References

REFERENCE = "${env:SECRET}"
CUTS: dict[str, Callable[[str], str]] = {
    "whole": lambda value: value,
    "repr": repr,
    "json": json.dumps,
    "cut": lambda value: value[:80],
    "end": lambda value: value[-20:],
    "cut repr": lambda value: repr(value[:80]),
    "cut json": lambda value: json.dumps(value)[:40],
    "lower": str.lower,
    "upper": str.upper,
    "url": lambda value: quote(value, safe=""),
}
VALUES = (
    "RED2-SECRET-" + "0123456789abcdef" * 8,
    "first-line-of-it\nsecond line\twith 'quotes' and \"more\" \\ of it",
    "s\u00e4mtliche Geheimnisse \N{SNOWMAN} in einer Zeile",
)


@pytest.mark.parametrize("form", CUTS)
@pytest.mark.parametrize("value", VALUES)
def test_no_part_of_a_value_is_shown(value: str, form: str) -> None:
    references = References(Path("/"), {"SECRET": value})
    assert references.resolve(REFERENCE) == value
    case = CUTS[form](value)
    hidden_text = references.hide_values(f"the image {case!s} is not allowed here")
    assert REFERENCE in hidden_text
    assert hidden_text.startswith("the image ")
    assert hidden_text.endswith(" is not allowed here")
    parts = [case[start : start + 8] for start in range(len(case) - 7)]
    assert not [part for part in parts if part in hidden_text]
    assert value not in repr(references)


@given(st.text(min_size=20, max_size=200), st.integers(0, 100), st.integers(20, 100))
def test_no_cut_of_any_value_is_shown(value: str, start: int, size: int) -> None:
    references = References(Path("/"), {"SECRET": value})
    references.resolve(REFERENCE)
    part = value[start : start + size]
    if len(part) >= 8:
        assert part not in references.hide_values(f"<{part}>")


@pytest.mark.parametrize(
    "fields",
    [
        "image: ${file:held}",
        "revision: ${file:held}",
        "aliases: ['${file:held}']",
        "commits: {a/b: '${file:held}'}",
        "chat_template: {text: a, name: '${file:held}'}",
        "policy: {engine: '${file:held}'}",
        "loras: {'a b': '${file:held}'}",
        "context: ${file:held}",
    ],
)
@pytest.mark.parametrize("value", VALUES[:2])
def test_a_mistake_of_the_file_shows_no_value(tmp_path: Path, fields: str, value: str) -> None:
    (tmp_path / "held").write_text(value)
    file = tmp_path / "models.yaml"
    file.write_text(f"models:\n  m:\n    source: /x\n    {fields}\n")
    message = ""
    try:
        load(file)
    except BadRequest as error:
        message = str(error)
    assert value[:12] not in message
