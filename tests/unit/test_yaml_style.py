"""Width of YAML files: at most 100 columns wherever a line can break."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

from wrap_yaml import wrap

FOLDERS = (".github", "docker", "examples", "profiles")
FILES = sorted(
    path
    for folder in FOLDERS
    for ending in ("yaml", "yml")
    for path in (ROOT / folder).rglob(f"*.{ending}")
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_are_wrapped(path: Path) -> None:
    text = path.read_text()
    assert wrap(text) == text, f"run: python scripts/wrap_yaml.py {path.relative_to(ROOT)}"


WORDS = "memory " * 20


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (f"a: {WORDS.strip()}\n", 2),
        (f"- a: '{WORDS.strip()}'\n", 2),
        (f"a: {{b: 1, c: {WORDS.strip()}, d: 2}}\n", 2),
        (f"a: [{WORDS.strip().replace(' ', ', ')}]\n", 2),
        (f"a:\n  - {WORDS.strip()}\n  - short\n", 4),
        (f"a: 1  # {WORDS.strip()}\n", 3),
        (f"a: {'x' * 98}\n", 2),
        # Nothing to break at.
        (f"a: |\n  {WORDS.strip()}\n", 2),
        (f"{WORDS.strip()}: 1\n", 1),
        (f'a: "{"x" * 110}"\n', 2),
        # Lines of one list or text fill up, rows of a mapping stay.
        (f"a: [\n  {'word, ' * 18}\n  {'word, ' * 2}\n]\n", 4),
        (f"a: {{\n  b: {WORDS.strip()},\n  c: 1}}\n", 4),
    ],
)
def test_a_long_line_breaks_where_its_value_stays(text: str, lines: int) -> None:
    result = wrap(text)
    assert len(result.splitlines()) == lines, result
    assert wrap(result) == result


def test_a_marked_document_keeps_its_line() -> None:
    text = f"a: 1\n--- # {WORDS.strip()}\nb: 2\n"
    assert wrap(text) == text
