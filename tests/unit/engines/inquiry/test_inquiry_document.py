"""Questions, and the strict reading of answers: an image may answer anything."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import Question
from gateway.engines.inquiry.inquiry_document import (
    BadAnswer,
    ModelFiles,
    StatedGpus,
    document,
    read_answers,
    read_version,
)
from tests.support.makers import machine
from tests.support.versions import VLLM_REF

ONE = Question(engine=VLLM_REF, capability="8.6", argv=("--dtype=bfloat16",))


def line(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_a_document_holds_files_as_they_are_and_no_others() -> None:
    gpus = StatedGpus.match_machine(machine("2x3090"), "8.6")
    files = ModelFiles(b"{}", b"\0\1", b'{"hf_quant_config.json": {"quantization": {}}}')
    content = json.loads(document("vllm", gpus, model=files, questions=[ONE]))
    assert content["gpu"] == {
        "capability": "8.6",
        "memory_bytes": gpus.memory_bytes,
        "count": 2,
        "name": "NVIDIA GeForce RTX 3090",
    }
    model = content["models"][0]
    assert {name: base64.b64decode(text) for name, text in model["files"].items()} == {
        "config.json": b"{}",
        "model.safetensors": b"\0\1",
        "hf_quant_config.json": b'{"quantization": {}}',
    }
    assert model["questions"] == [{"argv": ["--dtype=bfloat16"]}]


def test_answers_belong_to_their_questions_and_say_where_they_are_from() -> None:
    answers = read_answers(
        [line(model=0, question=0, refused="ValueError: no"), line(done=True)], [ONE], "sha256:1"
    )
    assert answers[ONE].refusal_text == "ValueError: no"
    assert answers[ONE].source == "sha256:1"


@pytest.mark.parametrize(
    "wrong",
    [
        b"Traceback (most recent call last):",
        b"[]",
        b"[" * 100_000,
        line(question=1, refused="of a question that was not asked"),
        line(question=-1, refused="no"),
        line(question="0", refused="no"),
        line(question=0),
        line(question=0, answer={"weights": "many"}),
        line(question=0, answer={"weights": 1, "argv": ["--trust-remote-code"]}),
        line(question=0, answer={"kv": {"block_bytes": 1, "needed": [[1]]}}),
    ],
)
def test_a_malformed_answer_is_refused(wrong: bytes) -> None:
    with pytest.raises(BadAnswer):
        read_answers([wrong], [ONE], "image")


@given(st.binary(max_size=200))
def test_bytes_are_read_or_refused(answer: bytes) -> None:
    try:
        assert set(read_answers([answer], [ONE], "image")) <= {ONE}
        read_version(answer)
    except BadAnswer:
        return


def test_a_version_is_an_object() -> None:
    assert read_version(line(version={"flags": {}})) == {"flags": {}}
    assert read_version(line(done=True)) is None
    with pytest.raises(BadAnswer):
        read_version(line(version=[1]))
