"""CONTRIBUTING.md is a map: it names every module of the package, each once, in the folder where
the module is."""

from __future__ import annotations

import re
from collections import Counter

from tests.support.paths import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def named() -> Counter[str]:
    """`gateway/FOLDER/NAME.py` for each line `* NAME: ...` below a heading with the folder."""
    found: Counter[str] = Counter()
    folder = None
    for line in PAGE.splitlines():
        if heading := re.fullmatch(r"### `(gateway/[a-z_/]*)`.*", line):
            folder = heading[1]
        elif line.startswith("#"):
            folder = None
        elif folder and (item := re.match(r"\* `([a-z_]+)`: ", line)):
            found[f"{folder}{item[1]}.py"] += 1
    return found


def test_the_map_names_every_module_once() -> None:
    there = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "gateway").rglob("*.py")
        if path.name != "__init__.py"
    }
    assert named() == Counter(there)
