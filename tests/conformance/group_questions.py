"""The contents of a rank in vLLM where groups of ranks have requests of their own and share the
experts: asked of its constructors.

An answer has `weights`, bytes of one rank, and `experts`, their kernels with sizes; or `refused`,
the engine's words.
"""

from __future__ import annotations

import json
from typing import Any

from gateway.engines.inside.__main__ import error_text
from gateway.engines.vllm.inside import answers as vllm_answers
from tests.conformance.group_cases import CAPABILITIES, Groups, groups
from tests.conformance.layer_cases import case
from tests.conformance.model_cases import OLDER_BEFORE

__all__ = ["CAPABILITIES", "OLDER_BEFORE", "answers", "questions"]


def questions(version: str) -> list[Groups]:
    return groups(version)


def answers(version: str) -> list[Any]:
    vllm_answers.stand_in_for_packages()
    return [_answer(question) for question in questions(version)]


def _answer(group: Groups) -> Any:
    files = {"config.json": json.dumps(case(group.model, group.quant)).encode()}
    command = [f"--tensor-parallel-size={group.tp}", f"--data-parallel-size={group.dp}"]
    command += ["--dtype=bfloat16", "--max-model-len=512", "--enforce-eager"]
    command += ["--enable-expert-parallel"] if group.whole else []
    try:
        answer = vllm_answers.answer_question(files, command)
    except Exception as error:  # an engine's refusal is an answer
        return {"refused": error_text(error)[:200]}
    return {"weights": answer["weights"], "experts": experts_of(answer)}


def experts_of(answer: dict[str, Any]) -> list[str]:
    """The kernels of experts in an engine's answer, with the sizes of one expert."""
    return sorted(
        {f"{row['kernel']} {row['k']}x{row['n']}" for row in answer["kernels"] if row["experts"]}
    )
