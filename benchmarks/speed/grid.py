"""The measured grid: settings of each model, and the loads of each setting.

The first setting of each model has no flags: the engine's own defaults. Flags are those of vLLM
0.26.0.
"""

from __future__ import annotations

from typing import NamedTuple


class Load(NamedTuple):
    """Requests of random tokens, `concurrency` at a time."""

    name: str
    concurrency: int
    requests: int
    tokens_in: int
    tokens_out: int


LOADS = (
    Load("1", 1, 3, 512, 128),
    Load("8", 8, 32, 512, 128),
    Load("64", 64, 192, 512, 128),
    Load("256", 256, 768, 512, 128),
    Load("ttft-2k", 1, 4, 2048, 1),
    Load("ttft-32k", 1, 2, 32768, 1),
)


class Setting(NamedTuple):
    """A model with flags of the engine, and how many GPUs they take."""

    model: str
    name: str
    flags: tuple[str, ...] = ()
    gpus: int = 1


BATCHED_2K = ("--max-num-batched-tokens=2048",)
BATCHED_16K = ("--max-num-batched-tokens=16384",)
SEQS_64 = ("--max-num-seqs=64",)
FP8_KV = ("--kv-cache-dtype=fp8",)
EAGER = ("--enforce-eager",)
SYNCHRONOUS = ("--no-async-scheduling",)
TRITON = ("--attention-backend=TRITON_ATTN",)
# The flags of each model's columns that all have in common, in the order of their worth where time
# is short.
FIRST = (("defaults", ()), ("batched-2k", BATCHED_2K), ("kv-fp8", FP8_KV), ("eager", EAGER))
THEN = (("seqs-64", SEQS_64), ("batched-16k", BATCHED_16K))
LAST = (("synchronous", SYNCHRONOUS),)
ONE_GPU = (
    "llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b", "llama-3.1-8b-awq", "llama-3.1-8b-fp8",
    "deepseek-v2-lite", "llama-3.2-1b",
    "llama-3.1-8b-gptq",
)  # fmt: skip
OTHERS = (
    Setting("llama-3.1-8b", "triton-attention", TRITON),
    Setting("llama-3.1-8b-awq", "marlin", ("--linear-backend=marlin",)),
    Setting("llama-3.1-8b-gptq", "marlin", ("--linear-backend=marlin",)),
    Setting("gpt-oss-20b", "marlin", ("--moe-backend=marlin",)),
    Setting("deepseek-v2-lite", "triton-mla", ("--attention-backend=TRITON_MLA",)),
    Setting("llama-3.3-70b-fp8", "defaults"),
)
TWO = ("--tensor-parallel-size=2",)
FOUR = ("--tensor-parallel-size=4",)
SEVERAL = (
    Setting("llama-3.1-8b", "tp2", TWO, 2),
    Setting("llama-3.3-70b-fp8", "tp2", TWO, 2),
    Setting("qwen3-30b-a3b", "tp2", TWO, 2),
    Setting("llama-3.3-70b", "tp2", TWO, 2),
    Setting("llama-3.3-70b-fp8", "tp4", FOUR, 4),
)
SEVERAL_MORE = (
    Setting("llama-3.1-8b", "pp2", ("--pipeline-parallel-size=2",), 2),
    Setting("llama-3.1-8b", "dp2", ("--data-parallel-size=2",), 2),
    Setting("llama-3.1-8b", "tp4", FOUR, 4),
    Setting("llama-3.3-70b", "tp4", FOUR, 4),
)


def columns(settings: tuple[tuple[str, tuple[str, ...]], ...]) -> tuple[Setting, ...]:
    return tuple(Setting(model, name, flags) for name, flags in settings for model in ONE_GPU)


GRID = (*columns(FIRST), *SEVERAL, *columns(THEN), *OTHERS, *SEVERAL_MORE, *columns(LAST))
