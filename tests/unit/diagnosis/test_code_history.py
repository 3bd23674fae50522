"""The history of an engine's code, and the script that writes it."""

from __future__ import annotations

from types import ModuleType

import pytest

from gateway.diagnosis.code_history import (
    CodeChange,
    CodeHistory,
    CodeStep,
    decode,
    encode,
    function_hash,
    line_hash,
    text_hashes,
)
from gateway.domain.release import release
from gateway.profiles.profiles import Profiles
from tests.support.paths import ROOT
from tests.support.scripts import script_module

FILE, OTHER = "vllm/frob.py", "vllm/ops/frob.py"
OLD = '''
"""A module."""
LIMIT = 4

def kept(a: int) -> int:
    """Doc."""
    return a + 1

def lifted(a):
    return [a, "never changed"]

class Frob:
    def run(self, rows):
        if not rows:
            raise ValueError(f"the frob of {rows} cannot be larger than a row")
        return self.table[rows]

def old():
    return 2
'''
NEW = """
LIMIT = 4  # rows


def kept(a):
    return a + 1

class Frob:
    def run(self, rows):
        if not rows:
            raise ValueError(f"the frob of {rows} must be at least one row")
        return self.table.get(rows)

def young():
    return 3
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return script_module("engine-history")


@pytest.fixture(scope="module")
def step(script: ModuleType) -> CodeStep:
    before = {FILE: script.file_code(OLD.encode())}
    lifted_code = 'def lifted(a):\n    return [a, "never changed"]\n'
    after = {FILE: script.file_code(NEW.encode()), OTHER: script.file_code(lifted_code.encode())}
    result = script.version_step("1.0", "1.1", before, after)
    assert isinstance(result, CodeStep)
    return result


def history(*steps: CodeStep) -> CodeHistory:
    by_version = {step.version: step for step in steps}
    return CodeHistory(tuple(by_version), by_version.__getitem__)


def test_a_step_survives_its_file(step: CodeStep) -> None:
    assert decode(encode(step)) == step
    assert decode(encode(CodeStep("1.1", "1.0"))) == CodeStep(
        "1.1", "1.0", [], [], [], [], [], [], {}
    )


@pytest.mark.parametrize("data", [b"", b"frob\n", b"fitserve engine history 1 1.0 1.1 9 0\n"])
def test_another_file_is_no_step(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(data)


def test_a_cut_off_file_is_no_step(step: CodeStep) -> None:
    with pytest.raises(ValueError, match="numbers instead of"):
        decode(encode(step)[:-1])


def test_comments_docstrings_and_annotations_are_no_change(step: CodeStep) -> None:
    assert history(step).change(FILE, "kept", "return a + 1", ("1.0", "1.1")) is None
    assert not history(step).has_changed(FILE, "kept", "1.0", "1.1")


@pytest.mark.parametrize(
    ("name", "line", "form"),
    [
        ("run", "    return self.table[rows]", "line"),
        ("run", "if not rows:", "changed"),
        ("run", "", "changed"),
        ("old", "return 2", "gone"),
    ],
)
def test_a_change_is_told_by_its_clearest_form(
    step: CodeStep, name: str, line: str, form: str
) -> None:
    assert history(step).change(FILE, name, line, ("1.0", "1.1")) == CodeChange("1.1", form)
    assert history(step).change(FILE, name, line, ("1.1", "1.1")) is None


def test_code_that_moved_is_followed(step: CodeStep) -> None:
    assert step.moved == {function_hash(FILE, "lifted"): function_hash(OTHER, "lifted")}
    later = CodeStep("1.2", "1.1", changed=[function_hash(OTHER, "lifted")])
    whole = history(step, later)
    assert whole.change(FILE, "lifted", "", ("1.0", "1.1")) is None
    assert whole.change(FILE, "lifted", "", ("1.0", "1.2")) == CodeChange("1.2", "changed")
    assert not whole.has_changed(OTHER, "lifted", "1.0", "1.1")
    assert whole.has_changed(OTHER, "lifted", "1.0", "1.2")


def test_a_line_that_is_gone_later_says_more_than_a_change_before() -> None:
    key, line = function_hash(FILE, "run"), line_hash(FILE, "run", "return 1 / 0")
    whole = history(
        CodeStep("1.10", "1.9", changed=[key], lines_gone=[line]),
        CodeStep("1.9", "1.8", changed=[key]),
    )
    assert whole.change(FILE, "run", "return 1 / 0", ("1.8", "1.10")) == CodeChange("1.10", "line")
    assert whole.change(FILE, "run", "", ("1.8", "1.10")) == CodeChange("1.9", "changed")
    assert whole.knows_changes_since("1.8")
    assert not whole.knows_changes_since("1.7.2")
    assert not CodeHistory(()).knows_changes_since("1.8")


def test_a_function_of_a_newer_version_is_in_no_older_one(step: CodeStep) -> None:
    assert history(step).has_changed(FILE, "young", "1.0", "1.1")
    assert not history(step).has_changed(FILE, "young", "1.1", "1.2")


def test_messages_are_known_by_their_constant_words(step: CodeStep) -> None:
    whole = history(step)
    message = "ValueError: the frob of 12 cannot be larger than a row"
    new_message = "the frob of 12 must be at least one row"
    assert whole.version_without(message, "1.0", "1.1") == "1.1"
    assert whole.version_without(new_message, "1.0", "1.1") is None
    assert whole.adding_version(new_message, "1.0", "1.1") == "1.1"
    assert whole.adding_version(message, "1.0", "1.1") is None
    assert not [*text_hashes("too few words here")]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_every_described_version_has_its_step(kind: str) -> None:
    profiles = Profiles()
    paths = [*(ROOT / "profiles/engine_history" / kind).iterdir()]
    steps = [decode(path.read_bytes()) for path in paths]
    assert {path.name for path in paths} == {step.version for step in steps}
    versions = {step.version for step in steps} | {step.before for step in steps}
    assert {*profiles.signatures.rows.cures.versions[kind]} <= versions
    # One chain, without a gap.
    assert len({step.before for step in steps}) == len(steps)
    assert len(versions) == len(steps) + 1


def test_the_history_is_small() -> None:
    sizes = [path.stat().st_size for path in (ROOT / "profiles/engine_history").glob("**/*")]
    assert sum(sizes) < 2 * 2**20


def test_the_whole_code_is_that_of_the_last_version() -> None:
    key, moved_key = function_hash(FILE, "run"), function_hash(OTHER, "run")
    step, whole = CodeStep("1.1", "1.0", moved={key: moved_key}), CodeStep("1.1", new=[moved_key])
    several = CodeHistory(("1.1",), lambda _: step, lambda: whole)
    assert several.has(FILE, "run", "1.0")
    assert several.has(OTHER, "run", "1.1")
    assert not several.has(FILE, "run", "1.1")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_whole_code_is_kept_of_the_newest_step(kind: str) -> None:
    whole = decode((ROOT / f"profiles/engine_history/{kind}.all").read_bytes())
    names = [path.name for path in (ROOT / "profiles/engine_history" / kind).iterdir()]
    assert whole.version == max(names, key=release)
    assert len(whole.new) > 10_000
    assert Profiles().signatures.cures.rows.history(kind).knows_changes_to(whole.version)
