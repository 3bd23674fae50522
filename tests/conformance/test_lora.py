"""Adapters as each vLLM reads and serves them: its own parser reads the flags of plans, and the
profile names the models that it has none for.

The golden answers are made anew by scripts/engine-answers (lora_questions.py).
"""

from __future__ import annotations

import json

import pytest

from gateway.domain.value import served_name
from gateway.profiles.profiles import Profiles
from tests.conformance import lora_questions
from tests.conformance.golden import pairs
from tests.support.published import published_model
from tests.support.versions import VLLM

PROFILES = Profiles()


@pytest.mark.parametrize("version", VLLM)
def test_the_engines_own_parser_accepts_flags_of_plans(version: str) -> None:
    (read,) = [
        answer
        for question, answer in pairs(lora_questions, version, "9.0")
        if question == lora_questions.PARSER
    ]
    adapter_rows = [[served_name(name), path] for name, path in lora_questions.PLACED]
    assert json.loads(json.dumps(read)) == [adapter_rows, True, 16, 2, "/models/m"]


@pytest.mark.parametrize("version", VLLM)
def test_generating_architectures_without_adapters_are_known(version: str) -> None:
    answers_by_model = {
        model: answer
        for model, answer in pairs(lora_questions, version, "9.0")
        if model != lora_questions.PARSER
    }
    assert sum(answer is True for answer in answers_by_model.values()) >= 30
    without = {
        published_model(model).architecture
        for model, answer in answers_by_model.items()
        if answer is False and published_model(model).task == "generate"
    }
    assert set(PROFILES.engine(f"vllm=={version}").no_lora) == without
