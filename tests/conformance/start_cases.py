"""Which starts the engine and the planner are both asked about: those that an engine refuses, and
their neighbours that it takes.
Shared by question and test."""

from __future__ import annotations

from itertools import product
from typing import Any

from tests.conformance import model_cases
from tests.support.versions import since

# model, quantization, capability, dtype, KV cache dtype
Start = tuple[str, str, str, str, str]

CAPABILITIES = ("7.0", "7.5", "8.6", "8.9", "9.0")
RESAVED = "-resaved"

_SINCE = {"gemma-4-31b": "0.19", "gemma-4-31b-resaved": "0.33"}
# Every KV cache of 8 bits is asked for where a backend's own code may refuse its selector's choice.
_CACHES = (
    ("llama-3.1-8b", "awq"),
    ("deepseek-v2-lite", "none"),
    ("gemma-2-9b", "none"),
    ("gemma-3-27b", "none"),
    ("gpt-oss-20b", "mxfp4"),
)
_WIDE = (
    "gemma-2-9b",
    "gemma-3-1b",
    "gemma-3-27b",
    "glm-4-32b",
    "gemma-4-31b",
    "glm-4.5-air",
    "qwen3-8b",
)


def starts(version: str) -> list[Start]:
    start_list: list[Start] = []
    for (model, quant), capability, kv in product(_CACHES, CAPABILITIES[1:], ("fp8", "fp8_e5m2")):
        start_list.append((model, quant, capability, _half(capability), kv))
    for model, capability, dtype in product(_WIDE, ("7.5", "8.6"), ("float16", "float32")):
        start_list.append((model, "none", capability, dtype, "auto"))
    for model, dtype in product(("gemma-3-27b", "glm-4-32b", "gemma-2-9b"), ("float16", "float32")):
        start_list += [(model, quant, "7.5", dtype, "auto") for quant in ("w4a16", "gptq", "awq")]
    for quant, capability in product(
        ("none", "w4a16", "w8a16", "int8", "fp8-dynamic", "gptq", "awq"), ("7.0", "7.5")
    ):
        start_list.append(("llama-3.1-8b", quant, capability, "float16", "auto"))
    for model in ("gemma-4-31b", "qwen3-30b-a3b"):
        start_list += [(f"{model}{RESAVED}", "none", "8.6", "bfloat16", "auto")]
    start_list += [
        ("nemotron-3-nano-30b-a3b", "none", capability, _half(capability), "auto")
        for capability in CAPABILITIES[1:]
    ]
    return [start for start in start_list if since(version, _SINCE.get(start[0], "0"))]


def _half(capability: str) -> str:
    return "float16" if float(capability) < 8 else "bfloat16"


def config(model: str, quant: str) -> dict[str, Any]:
    """The config.json of this case."""
    fields = model_cases.config(model.removesuffix(RESAVED), quant)
    return resave(fields) if model.endswith(RESAVED) else fields


def resave(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields as transformers 5.20 writes them back."""
    text = dict(fields.get("text_config", fields))
    if "num_experts" in text:
        text["num_local_experts"] = text.pop("num_experts")
    if "global_head_dim" in text:
        wide = {"head_dim": text.pop("global_head_dim")}
        if text.get("num_global_key_value_heads") is not None:
            wide["num_key_value_heads"] = text.pop("num_global_key_value_heads")
        kinds = text["layer_types"]
        text["per_layer_config"] = {
            str(index): wide for index, kind in enumerate(kinds) if kind == "full_attention"
        }
    return fields | {"text_config": text} if "text_config" in fields else text
