"""The contents of a rank in SGLang where groups of ranks have requests of their own and share the
experts: asked of its constructors.

Answers are those of group_questions.py.
"""

from __future__ import annotations

import json
from typing import Any

from gateway.engines.inside.__main__ import error_text
from gateway.engines.sglang.inside import answers as sglang_answers
from tests.conformance.group_cases import CAPABILITIES, Groups, groups
from tests.conformance.group_questions import experts_of
from tests.conformance.layer_cases import case
from tests.conformance.sglang_model_questions import ENGINE, OLDER_BEFORE, complete
from tests.support.versions import since

__all__ = ["CAPABILITIES", "ENGINE", "OLDER_BEFORE", "answers", "questions"]


def questions(version: str) -> list[Groups]:
    return groups(version)


def answers(version: str) -> list[Any]:
    return [_answer(version, question) for question in questions(version)]


def _answer(version: str, group: Groups) -> Any:
    files = {"config.json": json.dumps(complete(case(group.model, group.quant))).encode()}
    command = [f"--tp-size={group.tp * group.dp}", "--dtype=bfloat16", "--context-length=512"]
    command += (
        [f"--attn-dp-size={group.dp}"]
        if since(version, "0.5.21")
        else [f"--dp-size={group.dp}", "--enable-dp-attention"]
    )
    command += [f"--ep-size={group.tp * group.dp}"] if group.whole else []
    try:
        answer = sglang_answers.answer_question(files, command)
    except Exception as error:  # an engine's refusal is an answer
        return {"refused": error_text(error)[:200]}
    return {"weights": answer["weights"], "experts": experts_of(answer)}
