"""Versions of an engine with other code where a failure was raised."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.diagnosis.code_history import (
    CodeHistory,
    CodeStep,
    function_hash,
    line_hash,
    text_hashes,
)
from gateway.diagnosis.code_versions import code_versions, engine_frames
from gateway.diagnosis.diagnose import diagnose
from gateway.diagnosis.log_reader import LogReader
from gateway.diagnosis.structure import ExceptionShape
from gateway.domain import Scalar
from gateway.errors import SettingsError
from gateway.profiles.profiles import Profiles

SITE = "/opt/venv/lib/python3.12/site-packages"
RUN, OUTER = "vllm/frob/run.py", "vllm/frob/outer.py"
LINE = "return self.table[rows]"
SHAPE = ExceptionShape(
    "KeyError",
    "'rows'",
    (f"{SITE}/{OUTER}:call", f"/src/vllm/{RUN}:run", f"{SITE}/torch/frob.py:at"),
    "load",
    codes=("run(rows)", LINE, "raise KeyError"),
)
VERSIONS = ("1.0", "1.1", "1.2", "1.3")
WHOLE = CodeStep("1.3", new=sorted([function_hash(RUN, "run"), function_hash(OUTER, "call")]))


def versions(shape: ExceptionShape, version: str, *steps: CodeStep) -> dict[str, Scalar]:
    """The answer of code_versions for versions 1.0 to 1.3 with these changes."""
    several = {f"1.{number}": CodeStep(f"1.{number}", f"1.{number - 1}") for number in (1, 2, 3)}
    several |= {step.version: step for step in steps}
    history = CodeHistory(tuple(several), several.__getitem__, lambda: WHOLE)
    return code_versions(history, f"vllm=={version}", shape, VERSIONS)


def change_step(version: str, path: str, name: str, line: str = "") -> CodeStep:
    lines = [line_hash(path, name, line)] if line else []
    return CodeStep(version, "", changed=[function_hash(path, name)], lines_gone=lines)


def test_the_frames_of_an_engine_are_those_of_its_package() -> None:
    frames = engine_frames(SHAPE)
    assert frames == [(RUN, "run", LINE), (OUTER, "call", "run(rows)")]


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (change_step("1.2", RUN, "run", LINE), "the line of run that led here is gone since 1.2"),
        (change_step("1.2", RUN, "run"), "run, which led here, has other code since 1.2"),
        (change_step("1.2", OUTER, "call"), "call, which led here, has other code since 1.2"),
        (CodeStep("1.3", "", removals=[function_hash(RUN, "run")]), "run, which led here, is gone"),
    ],
)
def test_a_newer_version_with_other_code_is_reported_with_the_reason(
    step: CodeStep, words: str
) -> None:
    version_words = versions(SHAPE, "1.1", step)
    assert version_words["others"] == "vllm==1.3"
    assert words in str(version_words["code_change"])
    assert "not known" in str(version_words["code_change"])


def test_a_newer_version_with_the_same_code_is_not_proposed() -> None:
    words = versions(SHAPE, "1.1", change_step("1.1", RUN, "run"))
    assert words["others"] == "vllm==1.0"
    assert "other code there, and newer versions have the same" in str(words["code_change"])


def test_no_version_is_proposed_where_all_have_the_same_code() -> None:
    assert versions(SHAPE, "1.1") == {"no_other_code": "yes"}


def test_the_newest_version_has_older_ones_alone() -> None:
    words = versions(SHAPE, "1.3", change_step("1.2", RUN, "run"))
    assert words["others"] == "vllm==1.1"
    assert "run, which led here, has other code there; whether" in str(words["code_change"])


def test_a_message_tells_versions_where_there_are_no_frames() -> None:
    message = "The frob size of 7 is not supported with rows"
    key = list(text_hashes("is not supported with rows"))
    code_step = CodeStep("1.2", "", texts_gone=key)
    new_code_step = CodeStep("1.1", "", texts_new=key)
    bare = ExceptionShape("", message, (), "load")
    assert versions(bare, "1.1", code_step, new_code_step)["others"] == "vllm==1.3 or vllm==1.0"
    assert "this message is gone since 1.2" in str(versions(bare, "1.1", code_step)["code_change"])
    assert versions(bare, "1.1") == {}


def test_a_version_before_the_history_tells_nothing() -> None:
    assert versions(SHAPE, "0.9", change_step("1.2", RUN, "run")) == {}


TRACEBACK = """\
Starting to load model /models/frob...
Traceback (most recent call last):
  File "/opt/venv/lib/python3.13/site-packages/vllm/frob/outer.py", line 7, in call
    self.run(
    ~~~~~~~~^
        rows,
    )
  File "/opt/venv/lib/python3.13/site-packages/vllm/frob/run.py", line 9, in run
    return self.table[rows]
           ~~~~~~~~~~^^^^^^
KeyError: 'rows'
"""


def test_a_traceback_keeps_the_first_line_of_code_of_each_frame() -> None:
    reader = LogReader(Profiles().signatures, "vllm==0.33.0")
    reader.feed(TRACEBACK.encode())
    [trace] = reader._evidence.processes.values()
    assert [*trace.codes] == ["self.run(", "return self.table[rows]"]
    assert len(trace.codes) == len(trace.files)


def test_a_damaged_step_is_named_when_a_diagnosis_needs_it(tmp_path: Path) -> None:
    folder = tmp_path / "engine_history/vllm/0.18.1"
    folder.parent.mkdir(parents=True)
    folder.write_bytes(b"frob")
    signatures = Profiles(tmp_path).signatures
    # Neither a log of another engine nor one without a version reads the history.
    diagnose([TRACEBACK.encode()], signatures, "vllm")
    diagnose([TRACEBACK.encode()], signatures, "sglang==0.5.23")
    with pytest.raises(SettingsError, match=re.escape(str(folder))):
        diagnose([TRACEBACK.encode()], signatures, "vllm==0.30.0")


def test_a_version_beyond_the_history_may_have_other_code() -> None:
    several = {"1.1": CodeStep("1.1", "1.0")}
    history = CodeHistory(tuple(several), several.__getitem__, lambda: WHOLE)
    assert code_versions(history, "vllm==1.0", SHAPE, ("1.0", "1.1", "1.2")) == {}
    assert code_versions(history, "vllm==1.0", SHAPE, ("1.0", "1.1")) == {"no_other_code": "yes"}


def test_a_function_that_no_version_has_tells_nothing() -> None:
    fork = SHAPE._replace(frames=(f"{SITE}/vllm/fork/run.py:run",), codes=(LINE,))
    assert versions(fork, "1.1") == {}


def test_code_that_moved_is_the_same_code() -> None:
    former = function_hash("vllm/former.py", "run")
    moves = CodeStep("1.3", "", moved={former: function_hash(RUN, "run")})
    shape = SHAPE._replace(frames=(f"{SITE}/vllm/former.py:run",), codes=(LINE,))
    assert versions(shape, "1.1", moves) == {"no_other_code": "yes"}


def test_no_version_is_proposed_for_a_fault_that_all_have() -> None:
    log = """\
Starting to load model /models/frob...
Traceback (most recent call last):
  File "/x/site-packages/vllm/utils/func_utils.py", line 7, in run_once
    frob[0]
IndexError: list index out of range
"""
    failure, _ = diagnose([log.encode()], Profiles().signatures, "vllm==0.30.0")
    assert failure.kind == "engine_bug"
    assert "vllm==" not in " ".join(failure.steps)
    assert any("every described version" in step for step in failure.steps)
