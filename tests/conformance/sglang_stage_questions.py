"""The contents of each stage of a pipeline in SGLang, with layers dealt out as a plan says: asked
of its constructors, stage by stage.

An answer has bytes of weights of each stage; or `refused`, the engine's words.
"""

from __future__ import annotations

import json
import os
from typing import Any

from gateway.engines.inside.__main__ import error_text
from gateway.engines.inside.meta import write_folder
from gateway.engines.sglang.inside.attention import record_backends
from gateway.engines.sglang.inside.model import build_model, configure_engine, meta, parse_arguments
from tests.conformance.layer_cases import case
from tests.conformance.sglang_model_questions import ENGINE, OLDER_BEFORE, complete
from tests.conformance.stage_cases import CAPABILITIES, Stages, argv, stages

__all__ = ["CAPABILITIES", "ENGINE", "OLDER_BEFORE", "answers", "questions"]

STAGE_LAYERS = "SGLANG_PP_LAYER_PARTITION"


def questions(version: str) -> list[Stages]:
    return stages(version)


def answers(version: str) -> list[Any]:
    record_backends()
    return [_answer(question) for question in questions(version)]


def _answer(stages: Stages) -> Any:
    os.environ.pop(STAGE_LAYERS, None)
    if stages.layers:
        os.environ[STAGE_LAYERS] = ",".join(map(str, stages.layers))
    files = {"config.json": json.dumps(complete(case(stages.model, stages.quant))).encode()}
    try:
        with write_folder(files) as folder:
            return [
                _stage_bytes(folder, argv(stages, "pp-size", "context-length"), stage)
                for stage in range(stages.count)
            ]
    except Exception as error:  # an engine's refusal is an answer
        return {"refused": error_text(error)[:200]}


def _stage_bytes(folder: str, command: list[str], stage: int) -> int:
    configuration = configure_engine(parse_arguments(folder, command), stage)
    with meta(str(configuration.model.dtype).removeprefix("torch.")):
        return sum(
            parameter.numel() * parameter.element_size()
            for parameter in build_model(configuration).parameters()
        )
