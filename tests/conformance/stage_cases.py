"""How layers are dealt out to stages of a pipeline that the engine and the planner are both asked about. Shared by questions and test."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.conformance.layer_cases import QUANTS
from tests.support.paths import MODELS

CAPABILITIES = ("8.6",)


@dataclass(frozen=True)
class Stages:
    """layers: of each stage, as the engine is told; (): as it deals them out to so many by itself."""

    model: str
    quant: str
    layers: tuple[int, ...]
    count: int = 2


def stages(_: str) -> list[Stages]:
    return [
        Stages("llama-3.1-8b", "none", ()),
        Stages("llama-3.1-8b", "none", (22, 10)),
        Stages("llama-3.1-8b", "none", (10, 22)),
        Stages("llama-3.1-8b", "none", (22, 11)),  # more than there are
        Stages("seed-oss-36b", "none", (42, 22)),
    ]


def argv(one: Stages, pipeline: str, context: str) -> list[str]:
    dtype = "float16" if one.quant == "awq" else "bfloat16"
    return [f"--{pipeline}={one.count}", f"--dtype={dtype}", f"--{context}=4096"]


def config(model: str, quant: str) -> dict[str, Any]:
    """The config.json, with all of its layers."""
    fields: dict[str, Any] = json.loads((MODELS / f"{model}.json").read_text())
    return fields | ({} if quant == "none" else {"quantization_config": QUANTS[quant]})
