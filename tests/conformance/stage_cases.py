"""Which stages of a pipeline the engines and the planner are both asked about. Shared by questions
and test."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.paths import MODELS

CAPABILITIES = ("8.6",)


@dataclass(frozen=True)
class Stages:
    """layers: the number of layers of each stage, given to the engine; (): the engine's own
    division."""

    model: str
    quant: str
    layers: tuple[int, ...]
    count: int = 2


def stages(_: str) -> list[Stages]:
    return [
        *(Stages(path.stem, "none", (), 3) for path in sorted(MODELS.glob("*.json"))),
        Stages("llama-3.1-8b", "none", ()),
        Stages("llama-3.1-8b", "none", (22, 10)),
        Stages("llama-3.1-8b", "none", (10, 22)),
        Stages("llama-3.1-8b", "none", (22, 11)),  # more than there are
        Stages("seed-oss-36b", "none", (42, 22)),
        Stages("seed-oss-36b", "none", (), 5),
        Stages("seed-oss-36b", "awq", (42, 22)),
        Stages("llama-3.1-8b", "awq", ()),
        Stages("llama-3.1-8b", "awq", (), 3),
        Stages("qwen3-8b", "gptq-dynamic", (), 3),
        Stages("qwen3-30b-a3b", "fp8", (), 2),
        Stages("qwen3-30b-a3b", "w4a16", (20, 28), 2),
        Stages("deepseek-v3", "fp8-block", (), 4),
        Stages("gpt-oss-20b", "mxfp4", ()),
    ]


def argv(stages: Stages, pipeline: str, context: str) -> list[str]:
    dtype = "float16" if stages.quant == "awq" else "bfloat16"
    return [f"--{pipeline}={stages.count}", f"--dtype={dtype}", f"--{context}=512"]
