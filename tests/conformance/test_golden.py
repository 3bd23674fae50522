"""The kept answers of engines belong together: every question has its file, every engine its wheel,
and none is stray."""

from __future__ import annotations

import importlib
import re
import shutil
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from tests.conformance import golden, sglang_linear_questions
from tests.support.versions import PROFILES, SGLANG, VLLM, kinds, versions

CONFORMANCE = golden.FOLDER.parent
MODULES = [
    importlib.import_module(f"tests.conformance.{path.stem}")
    for path in sorted(CONFORMANCE.glob("*_questions.py"))
]
ASKED = [(module, version) for module in MODULES for version in versions(golden.engine_of(module))]


@pytest.mark.parametrize(
    ("module", "version"), ASKED, ids=lambda part: getattr(part, "__name__", part)
)
def test_every_question_has_its_answers_on_every_machine(module: ModuleType, version: str) -> None:
    question_count = len(list(module.questions(version)))
    assert [len(row) for row in golden.golden(module, version).values()] == [question_count] * len(
        golden.machines_of(module, version)
    )


def test_every_shipped_version_has_answers_to_every_question() -> None:
    assert golden.missing(MODULES) == []


def test_every_kind_but_vllm_for_cpus_has_answers() -> None:
    assert set(kinds()) == {golden.engine_of(module) for module in MODULES} | {"vllm-cpu"}


def test_a_copied_profile_names_the_questions_for_its_engine(tmp_path: Path) -> None:
    for kind, version, copy in (("vllm", VLLM[-1], "999.1"), ("sglang", SGLANG[0], "999.2.post1")):
        (tmp_path / "engines" / kind).mkdir(parents=True)
        shutil.copy(
            PROFILES / f"engines/{kind}/{version}.yaml", tmp_path / f"engines/{kind}/{copy}.yaml"
        )
    missing = golden.missing(MODULES, tmp_path)
    assert (
        "linear-999.1.json is missing: run `scripts/engine-answers linear --version 999.1`"
        in missing
    )
    assert (
        "sglang_moe-999.2.post1.json is missing: run `scripts/engine-answers sglang_moe --version"
        " 999.2.post1`" in missing
    )
    assert len(missing) == len(MODULES)


# Asked as engines that nobody described: tests/e2e/test_unpacked_engines.py and
# test_sglang_starts.py.
NO_RULES = {"vllm==0.30.0", "sglang==0.5.15.post1"}


def test_each_file_belongs_to_a_question() -> None:
    assert {path.name for path in golden.FOLDER.iterdir()} == {
        golden.path_of(*pair).name for pair in ASKED
    }


def test_every_recorded_engine_has_its_wheel_and_packages() -> None:
    document = tomllib.loads((CONFORMANCE / "engine/wheels.toml").read_text())
    engines = {f"{golden.engine_of(module)}=={version}" for module, version in ASKED}
    wrong = sorted((engines | NO_RULES) ^ set(document))
    assert not wrong, (
        f"sections of tests/conformance/engine/wheels.toml to add, or to remove: {', '.join(wrong)}"
    )
    for section in document.values():
        assert re.fullmatch(r"(--hash=sha256:[0-9a-f]{64} ?)+", section["wheel"])


def test_a_written_golden_file_is_read_back_unchanged() -> None:
    kept_path = golden.path_of(sglang_linear_questions, SGLANG[-1])
    assert (
        golden.file_text(sglang_linear_questions, SGLANG[-1], golden.read(kept_path.read_text()))
        == kept_path.read_text()
    )


def test_a_missing_or_outdated_golden_file_names_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = r"run `scripts/engine-answers sglang_linear --version "
    with pytest.raises(
        AssertionError, match=r"sglang_linear-9\.9\.json is missing: " + command + "9.9"
    ):
        golden.golden(sglang_linear_questions, "9.9")
    monkeypatch.setattr(
        sglang_linear_questions, "questions", lambda _: [("gptq", 4, True, 128, False)]
    )
    golden.golden.cache_clear()
    with pytest.raises(AssertionError, match="the questions changed: " + command):
        golden.golden(sglang_linear_questions, SGLANG[-1])
