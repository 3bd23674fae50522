"""Which kernel does vLLM take for each layer of each model, on one rank? The rules know layers by
their sizes, so a switch that depends on the model alone shows as a difference.

A question is (model, quantization). An answer is "NAME KERNEL KxN COUNT" of its layers, or null
where the engine refuses the model.
"""

from __future__ import annotations

from gateway.engines.vllm.inside.answers import stand_in_for_packages
from gateway.engines.vllm.inside.model import build_from_config, prepare
from tests.conformance import model_questions
from tests.conformance.model_cases import OLDER_BEFORE, config
from tests.conformance.switch_cases import cases, machines

__all__ = ["OLDER_BEFORE", "answers", "machines", "questions"]


def questions(version: str) -> list[tuple[str, str]]:
    return cases(version)


def answers(version: str) -> list[list[str] | None]:
    prepare()
    stand_in_for_packages()
    return [_answer(model, quant) for model, quant in questions(version)]


def _answer(model: str, quant: str) -> list[str] | None:
    try:
        with build_from_config(config(model, quant), 1) as (configuration, whole):
            return model_questions.rows_of({1: model_questions.layers_of(whole, configuration)})
    except Exception:  # an engine's refusal is an answer
        return None
