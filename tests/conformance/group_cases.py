"""Which groups of ranks with requests of their own the engines and the planner are both asked
about. Shared by questions and test."""

from __future__ import annotations

from dataclasses import dataclass

CAPABILITIES = ("9.0",)


@dataclass(frozen=True)
class Groups:
    """dp: groups of `tp` ranks. whole: experts are whole, and spread over all ranks."""

    model: str
    quant: str
    tp: int
    dp: int
    whole: bool = True


def groups(_: str) -> list[Groups]:
    return [
        Groups("deepseek-v2-lite", "none", 1, 2),
        Groups("deepseek-v2-lite", "none", 2, 4),
        Groups("gpt-oss-20b", "mxfp4", 1, 2),
        Groups("qwen3-30b-a3b", "none", 4, 2),
        Groups("qwen3-30b-a3b", "fp8-block", 1, 8),
        Groups("qwen3-30b-a3b", "none", 1, 4, whole=False),
        Groups("qwen1.5-moe-a2.7b", "none", 1, 8),  # 60 experts
    ]
