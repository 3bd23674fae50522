"""The scripts and forge files for contributors: the map, the issue forms and the workflows."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.conftest import TIERS
from tests.support.paths import ROOT
from tests.support.yaml_file import read_yaml

GITHUB = ROOT / ".github"
FORMS = sorted(
    path.name for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"
)


def printed_map(*rooms: str) -> str:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts/map"), *rooms],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_the_map_lists_every_module_with_its_purpose() -> None:
    lines = printed_map().splitlines()
    entries = [line.split() for line in lines if line.startswith("    ") and line[4] != " "]
    names = [words[0] for words in entries]
    for path in (ROOT / "gateway").rglob("*.py"):
        if path.name != "__init__.py":
            assert path.stem in names
    assert [words[0] for words in entries if len(words) == 1] == []


def test_the_map_of_a_room_has_only_its_folders() -> None:
    folders = [line.split()[0] for line in printed_map("store").splitlines() if line[:1].strip()]
    assert folders == ["gateway/store/"]


@pytest.mark.parametrize("name", FORMS)
def test_a_form_has_fields_with_labels(name: str) -> None:
    form = read_yaml(GITHUB / "ISSUE_TEMPLATE" / name)
    assert {"name", "description", "labels", "body"} <= form.keys()
    identifiers = [field["id"] for field in form["body"]]
    assert len(set(identifiers)) == len(identifiers)
    assert all(field["attributes"]["label"] for field in form["body"])


def test_there_is_a_form_for_bugs_failures_and_features() -> None:
    assert FORMS == ["bug.yml", "failure.yml", "feature.yml"]


@pytest.mark.parametrize(
    ("name", "command"), [("check.yml", ".ci/run"), ("release.yml", "scripts/release ")]
)
def test_a_workflow_runs_the_script(name: str, command: str) -> None:
    workflow = read_yaml(GITHUB / "workflows" / name)
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert any(step.get("run", "").startswith(command) for step in steps)


def test_the_hooks_are_those_of_the_check() -> None:
    repository = read_yaml(ROOT / ".pre-commit-config.yaml")["repos"][0]
    assert [hook["id"] for hook in repository["hooks"]] == ["ruff-format", "ruff", "mypy"]


# The marks that a test may have beside its tier.
KINDS = [
    *((tier, frozenset[str]()) for tier in TIERS),
    ("contract", frozenset({"docker"})),
    ("e2e", frozenset({"docker"})),
    ("e2e", frozenset({"engine"})),
    ("e2e", frozenset({"engine", "sources"})),
]


@pytest.mark.parametrize(("tier", "marks"), KINDS)
def test_one_process_of_the_suite_has_a_kind_of_test(tier: str, marks: frozenset[str]) -> None:
    """The two processes for `local` share it by folders."""
    names = ("docker", "engine", "sources")
    values = {name: name == tier for name in TIERS} | {name: name in marks for name in names}
    script = (ROOT / "scripts/test").read_text()
    commands = re.findall(r"^(?:start|nice .* pytest) (.*)$", script, re.MULTILINE)
    found = 0
    for command in commands:
        (expression,) = re.findall(r'-m (?:"([^"]*)"|(\w+))', command)
        folders = re.findall(r"(?<!--ignore )tests/(\w+)", command) or [tier]
        found += tier in folders and bool(eval("".join(expression), {}, values))
    assert found == (2 if tier == "local" else 1)
