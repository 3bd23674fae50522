"""The comparison in README.md agrees with the features of the program and with the other pages."""

from __future__ import annotations

import re

import pytest

from gateway.cli.registry import SECTIONS
from gateway.domain import Plan, Policy
from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text()
COMMANDS = {command for section in SECTIONS.values() for command in section}
# Each row of the comparison, and whether the program has its feature.
FEATURES = {
    "engine flags": "argv" in Plan.model_fields,
    "another plan after a failure": (ROOT / "profiles/failures/remedies.yaml").exists(),
    "load on request, unload when idle": "keep_alive" in Policy.model_fields,
    "engine over several machines": "cluster" in COMMANDS and "nodes" in Plan.model_fields,
    # README.md names both as not supported.
    "GGUF files": "GGUF files, AMD and Apple GPUs are not supported" not in README,
    "AMD and other GPUs": "GGUF files, AMD and Apple GPUs are not supported" not in README,
    "users and single sign-on": "keys" in COMMANDS,
}
# Statements of a page that a feature of the row makes false.
DENIALS = {
    "engine over several machines": r"no engine over several machines|no host starts these plans"
}


def cells() -> dict[str, str]:
    """The cell of fitserve in each row."""
    table = README.partition("## Compared with")[2]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")]
    return {row[0].strip(): row[1].strip() for row in rows[2:]}


def test_each_row_says_whether_the_program_has_the_feature() -> None:
    assert {name: not cell.startswith("no") for name, cell in cells().items()} == FEATURES


def test_commands_of_the_comparison_exist() -> None:
    names = {name for cell in cells().values() for name in re.findall(r"`fitserve (\w+)", cell)}
    assert names
    assert names <= COMMANDS


@pytest.mark.parametrize("row", DENIALS)
def test_no_page_denies_a_feature(row: str) -> None:
    assert FEATURES[row]
    wrong = [
        path.name
        for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        if re.search(DENIALS[row], " ".join(path.read_text().split()))
    ]
    assert not wrong
