"""Whether vLLM starts a model with the flags that a plan gives it, and the properties of the start:
asked of its parser, its configuration and its constructors, by the code that gateways ask by. The
backends that a selector names are made here, and may refuse.

A question is (model, quantization, capability, dtype, KV cache dtype); only those of the capability
that is booted are answered, the rest are null. An answer has `dtype`, the backends of its attention
and bytes of `weights`; or `refused`, the engine's words.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

from gateway.engines.inside.__main__ import error_text
from gateway.engines.vllm.inside import answers as vllm_answers
from tests.conformance.model_cases import OLDER_BEFORE
from tests.conformance.start_cases import CAPABILITIES, Start, config, starts

__all__ = ["CAPABILITIES", "OLDER_BEFORE", "answers", "questions"]


def questions(version: str) -> list[Start]:
    return starts(version)


def answers(version: str) -> list[dict[str, Any] | None]:
    vllm_answers.stand_in_for_packages()
    capability: Any = importlib.import_module(
        "vllm.platforms"
    ).current_platform.get_device_capability()
    text = f"{capability.major}.{capability.minor}"
    return [_answer(start) if start[2] == text else None for start in questions(version)]


def _answer(start: Start) -> dict[str, Any]:
    model, quant, _, dtype, kv_dtype = start
    files = {"config.json": json.dumps(config(model, quant)).encode()}
    argv = [
        f"--dtype={dtype}",
        f"--kv-cache-dtype={kv_dtype}",
        "--max-model-len=4096",
        "--enforce-eager",
    ]
    try:
        answer = vllm_answers.answer_question(files, argv)
    except Exception as error:  # an engine's refusal is an answer
        return {"refused": error_text(error)[:200]}
    backends = sorted({row["backend"] for row in answer["attention"]})
    return {
        "dtype": answer["settled"]["dtype"],
        "attention": backends,
        "weights": answer["weights"],
    }
