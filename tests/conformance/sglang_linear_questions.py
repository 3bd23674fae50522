"""Which integer checkpoints SGLang takes for Marlin, and whether its FP8 layers go there.

The shapes that Marlin then refuses stand in its CUDA files, which nothing here can run.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import product
from typing import Any

ENGINE = "sglang"
VERSIONS = ("0.5.10.post1", "0.5.23")
CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1")


def questions(version: str) -> Iterator[tuple[str, int, bool, int, bool]]:
    """(method, bits, symmetric, group size, act-order)."""
    del version
    yield from product(["gptq"], [2, 3, 4, 8], [True, False], [-1, 16, 32, 64, 128, 256], [True, False])
    yield "fp8", 8, True, -1, False


def answers(version: str) -> list[Any]:
    return [_answer(*question) for question in questions(version)]


def _answer(method: str, bits: int, symmetric: bool, group: int, act_order: bool) -> Any:
    if method == "fp8":
        return bool(importlib.import_module("sglang.srt.layers.quantization.fp8_utils").can_auto_enable_marlin_fp8())
    config = {"quant_method": "gptq", "bits": bits, "sym": symmetric, "group_size": group, "desc_act": act_order}
    gptq: Any = importlib.import_module("sglang.srt.layers.quantization.gptq")
    return gptq.GPTQMarlinConfig.override_quantization_method(config, None) == "gptq_marlin"
