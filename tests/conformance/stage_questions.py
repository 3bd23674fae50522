"""The contents of each stage of a pipeline in vLLM, with layers dealt out as a plan says: asked of
its constructors, stage by stage.

An answer has [bytes of weights, layers of attention] of each stage; or `refused`, the engine's
words.
"""

from __future__ import annotations

import json
import os
from typing import Any

from gateway.engines.inside.__main__ import error_text
from gateway.engines.inside.meta import write_folder
from gateway.engines.vllm.inside import answers as vllm_answers
from gateway.engines.vllm.inside import model as vllm_model
from tests.conformance.layer_cases import case
from tests.conformance.model_cases import OLDER_BEFORE
from tests.conformance.stage_cases import CAPABILITIES, Stages, argv, stages

__all__ = ["CAPABILITIES", "OLDER_BEFORE", "answers", "questions"]

STAGE_LAYERS = "VLLM_PP_LAYER_PARTITION"


def questions(version: str) -> list[Stages]:
    return stages(version)


def answers(version: str) -> list[Any]:
    vllm_answers.stand_in_for_packages()
    return [_answer(question) for question in questions(version)]


def _answer(stages: Stages) -> Any:
    os.environ.pop(STAGE_LAYERS, None)
    if stages.layers:
        os.environ[STAGE_LAYERS] = ",".join(map(str, stages.layers))
    files = {"config.json": json.dumps(case(stages.model, stages.quant)).encode()}
    vllm_model.prepare()
    try:
        with write_folder(files) as folder:
            arguments = vllm_model.parse_engine_arguments(
                folder,
                [*argv(stages, "pipeline-parallel-size", "max-model-len"), "--enforce-eager"],
            )
            return [_stage_bytes(arguments, stage) for stage in range(stages.count)]
    except Exception as error:  # an engine's refusal is an answer
        return {"refused": error_text(error)[:200]}


def _stage_bytes(config: Any, stage: int) -> list[int]:
    with vllm_model.build_on_meta(config, stage) as (configuration, whole):
        weights = sum(
            parameter.numel() * parameter.element_size() for parameter in whole.parameters()
        )
        return [weights, sum(row["layers"] for row in vllm_answers.attention(whole, configuration))]
