"""Which runner do experts get in SGLang where --moe-runner-backend names one? The questions, and
how the engine is asked.

The models, blocks and answers are those of sglang_moe_questions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.conformance import sglang_moe_questions as moe

ENGINE = "sglang"
CAPABILITIES = ("9.0", "12.0")
_RUNNERS = ("triton", "deep_gemm", "cutlass", "flashinfer_cutlass", "flashinfer_trtllm")
_SCHEMES = (
    moe.Question("", "none", "unquantized"),
    moe.Question("", "fp8", "fp8_tensor", 8),
    moe.Question("", "fp8", "fp8_block", 8, 128),
    moe.Question("", "compressed-tensors", "fp8_token", 8),
)


class Question(NamedTuple):
    """runner: the value of --moe-runner-backend."""

    experts: moe.Question
    runner: str


def questions(version: str) -> Iterator[Question]:
    del version
    for scheme, runner in itertools.product(_SCHEMES, _RUNNERS):
        yield Question(scheme._replace(model=moe.NAMES[0]), runner)


def answers(version: str) -> list[Any]:
    """Ask the engine that this process has booted."""
    return [
        moe.answer(question.experts, {"moe_runner_backend": question.runner})
        for question in questions(version)
    ]
