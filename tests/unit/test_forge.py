"""The scripts and forge files for contributors: the map, the issue forms and the workflows."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import TIERS, changed_variables, shard_of
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
def test_a_form_of_an_issue_has_fields_with_labels(name: str) -> None:
    form = read_yaml(GITHUB / "ISSUE_TEMPLATE" / name)
    assert {"name", "description", "labels", "body"} <= form.keys()
    identifiers = [field["id"] for field in form["body"]]
    assert len(set(identifiers)) == len(identifiers)
    assert all(field["attributes"]["label"] for field in form["body"])


def test_bugs_failures_and_features_have_a_form() -> None:
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


# The commands of the suite print their shard and their arguments, separated by ASCII's unit
# separator.
COMMANDS = r"""
setup() { :; }
id() { echo 1; }
ruff() { :; }
mypy() { :; }
nice() { shift 2; "$@"; }
python() { printf '%s\037' "${SHARD:-1/1}" "$@"; echo; }
"""


def suite() -> list[list[str]]:
    """The shard and the arguments of each pytest of scripts/test."""
    path, place = ROOT / "scripts/test", "\n. scripts/setup\n"
    script = path.read_text()
    assert place in script
    command = ["bash", "-c", script.replace(place, COMMANDS), str(path)]
    # This test itself may run in a shard.
    environment = {name: value for name, value in os.environ.items() if name != "SHARD"}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    lines = (line.split("\037")[:-1] for line in result.stdout.splitlines())
    return [[line[0], *line[3:]] for line in lines if line[1:3] == ["-m", "pytest"]]


def selects(command: list[str], file: str, marks: set[str]) -> bool:
    """Whether this pytest runs tests of the file with these marks."""
    paths, ignored_paths, expression = list[str](), list[str](), "True"
    shard, *arguments = command
    number, shards = map(int, shard.split("/"))
    if shard_of(file.removeprefix("tests/"), shards) != number:
        return False
    words = iter(arguments)
    for word in words:
        match word.partition("="):
            case "-m", _, _:
                expression = next(words)
            case "--ignore", _, path:
                ignored_paths.append(path or next(words))
            case path, _, _:
                paths.append(path)
    is_below = [file.startswith(path) for path in paths or ["tests"]]
    values = {name: name in marks for name in (*TIERS, "docker", "engine", "sources")}
    is_ignored = any(file.startswith(path) for path in ignored_paths)
    return any(is_below) and not is_ignored and bool(eval(expression, {}, values))


def test_one_process_of_the_suite_has_a_test() -> None:
    commands = suite()
    wrong = []
    for path in sorted((ROOT / "tests").glob("*/**/test_*.py")):
        file, text = path.relative_to(ROOT).as_posix(), path.read_text()
        marks = {file.split("/")[1]}
        if marks <= {*TIERS}:
            marks |= {"engine"} if "mark.engine" in text else set()
            marks |= {"sources"} if re.search("^SOURCES = ", text, re.MULTILINE) else set()
            # Tests of one file may need Docker and may not.
            for process_marks in (
                (marks, marks | {"docker"}) if marks & {"contract", "e2e"} else (marks,)
            ):
                if "engine" in process_marks and "docker" in process_marks:
                    continue
                if (
                    count := sum(selects(command, file, process_marks) for command in commands)
                ) != 1:
                    wrong.append((file, process_marks, count))
    assert not wrong


def test_changed_variables_have_names() -> None:
    before = {"KEPT": "1", "GONE": "1", "SET_ANEW": "1", "PYTEST_CURRENT_TEST": "a (setup)"}
    after = {"KEPT": "1", "NEW": "1", "SET_ANEW": "2", "PYTEST_CURRENT_TEST": "a (teardown)"}
    assert changed_variables(before, after) == ["GONE", "NEW", "SET_ANEW"]
