"""The pages for contributors: paths that exist, and modules that `scripts/map` can print."""

from __future__ import annotations

import ast
import re
import textwrap
from typing import Any

import pytest
import yaml

from tests.conftest import TIERS
from tests.support.paths import ROOT

PAGES = (
    "CONTRIBUTING.md",
    "docs/architecture.md",
    "docs/planner.md",
    "docs/data-plane.md",
    "docs/state.md",
    "docs/recipes.md",
    "docs/style.md",
    "benchmarks/README.md",
    "tests/README.md",
)
FOLDERS = ("benchmarks", "docker", "docs", "gateway", "profiles", "scripts", "tests")
# A path in backticks; words in capitals and `*` stand for other names.
PATH = re.compile(rf"`(?:[\w.]+ )*?((?:{'|'.join(FOLDERS)})/[^`\s]*)")
VARIES = re.compile(r"[A-Z]{2,}|[*{]")
MODULES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "gateway").rglob("*.py"))


def missing(text: str) -> list[str]:
    """Paths in a text that do not exist."""
    return [
        path
        for path in PATH.findall(text)
        if not VARIES.search(path) and not (ROOT / path.rstrip(":,;")).exists()
    ]


@pytest.mark.parametrize("page", PAGES)
def test_paths_of_contributor_pages_exist(page: str) -> None:
    assert missing((ROOT / page).read_text()) == []


def test_a_missing_path_is_found() -> None:
    text = "`gateway/none` `docs/none ARG` `gateway/errors.py` `profiles/KIND/x.yaml`"
    assert missing(text) == ["gateway/none", "docs/none"]


def test_every_module_has_a_first_docstring_line() -> None:
    without = []
    for name in MODULES:
        text = (ROOT / name).read_text()
        docstring = ast.get_docstring(ast.parse(text))
        if not name.endswith("__init__.py") and not (docstring and docstring.splitlines()[0]):
            without.append(name)
    assert without == []


def test_the_page_of_tests_has_a_row_for_each_tier() -> None:
    rows = re.findall(r"^\| `tests/(\w+)` \|", (ROOT / "tests/README.md").read_text(), re.MULTILINE)
    assert tuple(rows) == TIERS


def test_the_page_of_benchmarks_has_a_row_for_each_program() -> None:
    folder = ROOT / "benchmarks"
    text = (folder / "README.md").read_text()
    rows = re.findall(r"^\| `([\w/]+\.py)` \| [^|]+ \|$", text, re.MULTILINE)
    programs = {
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    assert sorted(rows) == sorted(programs)


def profile_rows() -> list[Any]:
    """The rows of cards and of failure texts."""
    cards = yaml.safe_load((ROOT / "profiles" / "cards.yaml").read_text())["cards"]
    texts = sorted((ROOT / "profiles" / "failures" / "texts").glob("*.yaml"))
    return [*cards, *(row for path in texts for row in yaml.safe_load(path.read_text()))]


def test_the_rows_of_the_recipes_are_those_of_profiles() -> None:
    blocks = (ROOT / "docs" / "recipes.md").read_text().split("```yaml\n")[1:]
    rows = [
        row
        for block in blocks
        for row in yaml.safe_load(textwrap.dedent(block.partition("```")[0].rstrip(" ")))
    ]
    assert len(rows) == 2
    known_rows = profile_rows()
    assert [row for row in rows if row not in known_rows] == []
