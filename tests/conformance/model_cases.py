"""Which whole models the engine and the planner are both asked for. Shared by question and test."""

from __future__ import annotations

from itertools import cycle
from typing import Any

from tests.conformance.layer_cases import QUANTS, case
from tests.conformance.weight_questions import MORE
from tests.support.versions import since

OLDER_BEFORE = "0.33"  # versions before are asked with requirements/asking-older.txt
ONLINE = "online-fp8"  # --quantization fp8

_MODELS = (
    "llama-3.1-8b", "qwen2.5-7b", "qwen3-8b", "qwen3-30b-a3b", "qwen3-next-80b-a3b",
    "qwen3.6-35b-a3b", "qwen1.5-moe-a2.7b",
    "gemma-2-9b", "gemma-3-1b", "gemma-3-27b", "mistral-7b-v0.1", "mistral-small-3.2-24b",
    "mixtral-8x7b", "gpt-oss-20b",
    "deepseek-v2-lite", "deepseek-v3", "deepseek-v3.2", "glm-4.5-air", "glm-4-32b", "phi-4-mini",
    "phi-3.5-moe",
    "granite-4.0-h-micro", "granite-4.0-h-small", "nemotron-3-nano-30b-a3b", "qwen2.5-vl-7b",
    "qwen3-vl-8b", "command-r7b",
    "olmo-2-13b", "seed-oss-36b", "minimax-m2", "ernie-4.5-21b-a3b", "bge-m3",
    "qwen3-embedding-0.6b", "gte-modernbert-base",
)  # fmt: skip
_SINCE = {
    "0.19": ("gemma-4-26b-a4b", "gemma-4-31b", "gemma-4-e4b"),
    "0.33": ("nemotron-nano-9b-v2",),  # before, by no transformers that builds the others too
}
# Only the first layers, with some of every kind: 4 where these do not say, and of this one all,
# some of which share a cache.
_LAYERS = {
    "deepseek-v3": 5, "deepseek-v3.2": 5, "command-r7b": 8, "qwen3-next-80b-a3b": 8,
    "qwen3.6-35b-a3b": 8, "qwen3.5-9b": 8,
    "gemma-3-1b": 12, "gemma-3-27b": 12, "gemma-4-31b": 12, "gemma-4-26b-a4b": 12,
    "gemma-4-e4b": 42, "gte-modernbert-base": 6,
    "granite-4.0-h-micro": 10, "granite-4.0-h-small": 10, "nemotron-3-nano-30b-a3b": 14,
    "nemotron-nano-9b-v2": 16,
}  # fmt: skip
_POOLING = {"bge-m3", "qwen3-embedding-0.6b", "gte-modernbert-base"}

_TWO, _THREE = ("8.6", "9.0"), ("8.6", "9.0", "12.0")
# (model, quantizations, capabilities)
_QUANTIZED: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("llama-3.1-8b", ("gptq", "awq", "w4a16", "auto-round", "int8"), _TWO),
    ("llama-3.1-8b", ("fp8", "fp8-dynamic", "fp8-ct-block", "nvfp4", ONLINE), _THREE),
    (
        "llama-3.1-8b",
        ("fp8-static", "modelopt-fp8", "modelopt-nvfp4", "w8a16", "mxfp4-weight-only"),
        ("8.9", "10.0"),
    ),
    ("llama-3.1-8b", ("gptq", "fp8", "awq"), ("7.5",)),
    (
        "llama-3.1-8b",
        ("gptq-act-order", "w4a8", "auto-round-awq", "bitsandbytes-4bit", "mxfp4-weight-only"),
        ("9.0",),
    ),
    (
        "llama-3.1-8b",
        ("fp8-weight-only", "nvfp4-weight-only", "gptq-asymmetric", "w4a16-asymmetric"),
        ("8.6",),
    ),
    ("qwen2.5-7b", ("gptq", "awq", "fp8-block"), ("8.6",)),
    ("qwen3-8b", ("fp8-block", "awq", "w4a16"), ("9.0", "12.0")),
    ("qwen3-30b-a3b", ("gptq", "awq", "w4a16", "fp8-block", "nvfp4"), _THREE),
    (
        "qwen3-30b-a3b",
        ("fp8-dynamic", "modelopt-nvfp4", ONLINE, "mxfp4-weight-only", "int8"),
        ("8.6", "10.0"),
    ),
    ("qwen3-30b-a3b", ("gptq", "fp8-dynamic"), ("7.5", "8.9")),
    ("qwen3-next-80b-a3b", ("fp8-block", "awq", "nvfp4"), _TWO),
    ("qwen3.6-35b-a3b", ("auto-round-language", "gptq-language", "fp8-block"), _TWO),
    ("qwen1.5-moe-a2.7b", ("gptq",), ("8.6",)),
    ("gemma-2-9b", ("w4a16", "fp8-dynamic"), ("8.6",)),
    ("gemma-3-1b", ("gptq", "bitsandbytes-4bit"), ("8.6",)),
    ("gemma-3-27b", ("w4a16", "fp8-dynamic"), ("12.0",)),
    ("mistral-7b-v0.1", ("awq", "gptq"), ("8.6", "7.5")),
    ("mistral-small-3.2-24b", ("fp8-dynamic", "w4a16"), ("9.0",)),
    ("mixtral-8x7b", ("awq", "gptq", "fp8", ONLINE), ("8.6",)),
    ("gpt-oss-20b", ("mxfp4", "mxfp4-ct"), ("8.6", "9.0", "10.0", "12.0")),
    ("deepseek-v2-lite", ("w4a16", "fp8-block"), _TWO),
    ("deepseek-v3", ("fp8-block", "nvfp4", "w4a16"), ("9.0", "10.0")),
    ("deepseek-v3.2", ("fp8-block",), ("9.0", "10.0")),
    ("glm-4.5-air", ("fp8-dynamic", "nvfp4", "w4a16"), _TWO),
    ("glm-4-32b", ("gptq", "fp8-dynamic"), ("8.6",)),
    ("phi-4-mini", ("w4a16", "fp8-dynamic"), ("12.0",)),
    ("phi-3.5-moe", ("fp8-dynamic",), ("8.6",)),
    ("granite-4.0-h-small", ("fp8-dynamic", "w4a16", ONLINE), ("8.6",)),
    ("nemotron-3-nano-30b-a3b", ("fp8-dynamic", "modelopt-nvfp4", "modelopt-fp8"), ("9.0", "10.0")),
    ("qwen2.5-vl-7b", ("awq", "w4a16"), ("8.6",)),
    ("qwen3-vl-8b", ("fp8-block", "fp8-dynamic"), ("9.0",)),
    ("minimax-m2", ("fp8-block",), ("12.0",)),
    ("ernie-4.5-21b-a3b", ("w4a16", "fp8-dynamic"), ("8.6",)),
    ("qwen3-embedding-0.6b", ("fp8-dynamic",), ("9.0",)),
    ("gemma-4-31b", ("w4a16", "fp8-dynamic", "auto-round-language"), ("8.6",)),
    ("gemma-4-26b-a4b", ("fp8-dynamic", "nvfp4"), ("8.6",)),
    ("granite-4.0-h-micro", ("w4a16", "fp8-dynamic"), ("8.6",)),
    ("nemotron-3-nano-30b-a3b", ("w4a16",), ("8.6",)),
    ("qwen3.5-9b", ("none", "fp8-block", "auto-round-language"), ("8.6",)),
    ("llama-3.1-8b", ("modelopt-mxfp8", "modelopt-block"), ("10.0",)),
)


def machines(version: str) -> tuple[str, ...]:
    """Those that are asked for most, and of each version one or two more: all take too long."""
    more = (("0.33", ("10.0", "7.5")), ("0.26", ("10.0",)), ("0.19", ("8.9",)), ("0", ("7.5",)))
    return (
        "8.6",
        "9.0",
        "12.0",
        *next(
            capabilities for first_version, capabilities in more if since(version, first_version)
        ),
    )


def triples(version: str) -> list[tuple[str, str, str]]:
    """(model, quantization, capability), each of which is asked for 1, 2, 4 and 8 ranks."""
    later = {
        model
        for first_version, models in _SINCE.items()
        if not since(version, first_version)
        for model in models
    }
    newer = [model for models in _SINCE.values() for model in models if model not in later]
    rows = [
        (model, "none", capability)
        for model, capability in zip((*_MODELS, *newer), cycle(("8.6", "9.0", "12.0")))
    ]
    for model, quants, capabilities in _QUANTIZED:
        rows += [(model, quant, capability) for quant in quants for capability in capabilities]
    return [row for row in rows if row[0] not in later and row[2] in machines(version)]


def config(model: str, quant: str) -> dict[str, Any]:
    """The config.json of this case."""
    fields = case(model, "none")
    block = (QUANTS | MORE).get(quant)
    if quant == "gptq-asymmetric":  # which versions take in this dtype alone
        fields |= {"torch_dtype": "float16", "dtype": "float16"}
    text, layers = fields.get("text_config", fields), _LAYERS.get(model, 4)
    text["num_hidden_layers"] = layers
    for name in ("layer_types", "hybrid_override_pattern"):
        text |= {name: text[name][:layers]} if name in text else {}
    return fields | ({} if block is None else {"quantization_config": block})


def pooling(model: str) -> bool:
    return model in _POOLING
