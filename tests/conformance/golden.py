"""The engines' answers that are kept: golden/NAME-VERSION.json holds those of NAME_questions.py, as
scripts/engine-answers writes them.

A file has the engine and its version, a digest of the questions, a table of the distinct answers,
and for every machine (a capability, then which optional packages it has where they are not those of
the image) their numbers, in the order of the questions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support.versions import PROFILES, versions

FOLDER = Path(__file__).parent / "golden"


def name_of(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2].removesuffix("_questions")


def path_of(module: ModuleType, version: str) -> Path:
    return FOLDER / f"{name_of(module)}-{version}.json"


def engine_of(module: ModuleType) -> str:
    return getattr(module, "ENGINE", "vllm")


def machines_of(module: ModuleType, version: str) -> tuple[str, ...]:
    """The machines that a version is asked for: CAPABILITIES, or machines(version) where versions
    are asked for different ones."""
    machines: tuple[str, ...] = (
        module.machines(version) if hasattr(module, "machines") else module.CAPABILITIES
    )
    return machines


def missing(modules: Iterable[ModuleType], profiles: Path = PROFILES) -> list[str]:
    """Every golden file that a version of these profiles lacks, with the command that makes it."""
    return [
        f"{path_of(module, version).name} is missing: {command(module, version)}"
        for module in modules
        for version in versions(engine_of(module), profiles)
        if not path_of(module, version).is_file()
    ]


def command(module: ModuleType, version: str) -> str:
    return f"run `scripts/engine-answers {name_of(module)} --version {version}`"


def digest(questions: Iterable[Any]) -> str:
    return "sha256:" + hashlib.sha256(repr(list(questions)).encode()).hexdigest()


def file_text(module: ModuleType, version: str, answers: Mapping[str, list[Any]]) -> str:
    """The text of the file."""
    table: dict[str, int] = {}  # the distinct answers as JSON, and their numbers
    rows = []
    for machine, machine_answers in answers.items():
        numbers = [table.setdefault(json.dumps(answer), len(table)) for answer in machine_answers]
        rows.append(f'    "{machine}": {json.dumps(numbers, separators=(",", ":"))}')
    head = f'"engine": "{engine_of(module)}=={version}",\n  "written by": "scripts/engine-answers",'
    head += f'\n  "questions": "{digest(module.questions(version))}"'
    distinct, body = ",\n".join(f"    {answer}" for answer in table), ",\n".join(rows)
    return f'{{\n  {head},\n  "table": [\n{distinct}\n  ],\n  "answers": {{\n{body}\n  }}\n}}\n'


def read(text: str) -> dict[str, list[Any]]:
    """For every machine its answers, in the order of the questions."""
    document = json.loads(text)
    return {
        machine: [document["table"][number] for number in numbers]
        for machine, numbers in document["answers"].items()
    }


@cache
def golden(module: ModuleType, version: str) -> dict[str, list[Any]]:
    """For every machine the answers kept, in the order of the questions: of these questions, or the
    test fails."""
    path, repeat_command = path_of(module, version), command(module, version)
    assert path.is_file(), f"{path.name} is missing: {repeat_command}"
    text = path.read_text()
    assert json.loads(text)["questions"] == digest(module.questions(version)), (
        f"the questions changed: {repeat_command}"
    )
    answers = read(text)
    assert tuple(answers) == machines_of(module, version), (
        f"{path.name} is of other machines: {repeat_command}"
    )
    return answers


def pairs(module: ModuleType, version: str, machine: str) -> list[tuple[Any, Any]]:
    """Each question with its answer."""
    return list(zip(module.questions(version), golden(module, version)[machine], strict=True))
