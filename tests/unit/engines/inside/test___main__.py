"""The program inside an engine's environment: errors in the engine's words, and errors of ours."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.engines.inside.__main__ import answer_questions
from gateway.engines.inside.meta import StandIn
from gateway.engines.sglang.inside.model import resolve_argument

MODEL: dict[str, Any] = {"files": {}, "questions": [{"argv": []}]}


def run_program(answer_of: Any) -> dict[str, Any]:
    out = io.StringIO()
    package = "gateway.engines.vllm.inside"
    answer_questions(SimpleNamespace(answer_question=answer_of, __package__=package), out, 0, MODEL)
    document: dict[str, Any] = json.loads(out.getvalue())
    return document


def test_an_error_of_the_engine_is_its_refusal() -> None:
    def engine(*_: Any) -> Any:
        raise AttributeError("'MergedColumnParallelLinear' object has no attribute 'weight'")

    assert run_program(engine)["refused"].startswith("AttributeError: 'MergedColumnParallelLinear'")


def test_a_crash_of_the_engine_is_reported_with_its_line(tmp_path: Path) -> None:
    (folder := tmp_path / "vllm").mkdir()
    source = "def of(config):\n    return config['theta']\ndef no():\n    raise KeyError('theta')\n"
    (path := folder / "rope.py").write_text(source)
    functions: dict[str, Any] = {}
    exec(compile(source, str(path), "exec"), functions)
    assert (
        run_program(lambda *_: functions["of"]({}))["refused"] == "KeyError: 'theta' at rope.py:2"
    )
    assert run_program(lambda *_: functions["no"]())["refused"] == "KeyError: 'theta'"


def test_an_assertion_without_words_says_where_it_stands() -> None:
    def engine(*_: Any) -> Any:
        raise AssertionError

    assert run_program(engine)["refused"] == "AssertionError: raise AssertionError"


def test_a_missing_part_of_a_stand_in_is_no_refusal() -> None:
    """A later version asks an object of ours for more than it was made with."""
    with pytest.raises(AttributeError, match="registry"):
        run_program(lambda *_: StandIn(device="cuda").registry)


def test_a_version_of_another_structure_refuses_nothing() -> None:
    """Then a line of ours fails, which says nothing of the model."""
    with pytest.raises(AttributeError):
        run_program(lambda *_: resolve_argument(object(), "tp_size"))
