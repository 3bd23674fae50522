"""Models of 109 families at full depth, as vLLM itself builds them of config.json alone.

A question is (family, quantization), for the last version. An answer is that of model_questions
without the KV cache, for 1, 2 and 4 ranks.
"""

from __future__ import annotations

from typing import Any

from gateway.engines.vllm.inside.answers import stand_in_for_packages
from gateway.engines.vllm.inside.model import prepare
from tests.conformance.forecast_cases import RANKS, cases, config
from tests.conformance.model_questions import answer_of
from tests.support.versions import versions

__all__ = ["answers", "machines", "questions"]


def machines(version: str) -> tuple[str, ...]:
    return ("9.0",) if questions(version) else ()


def questions(version: str) -> list[tuple[str, str]]:
    return cases() if version == versions("vllm")[-1] else []


def answers(version: str) -> list[dict[str, Any]]:
    prepare()
    stand_in_for_packages()
    return [
        answer_of(config(*case), RANKS, cache=False, max_model_len=256)
        for case in questions(version)
    ]
