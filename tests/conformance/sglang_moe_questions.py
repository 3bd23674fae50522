"""Which backend do a layer's experts get in SGLang? The questions, and how the engine is asked.

The engine's own model is built on the meta device from a published config.json with one layer and
the quantization block that a checkpoint would have, for one rank of a group of which only the size
is real, with the arguments that its server resolves for that model on that GPU. An answer is
[method, backend]: the class of the quantization method (or of its scheme) that took the experts,
and the runner that it chose, by the engine's own name for --moe-runner-backend. "method": the
engine refuses the checkpoint as a whole; "none": it refuses the layer.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from gateway.engines.sglang.inside import layers as sglang_layers
from gateway.engines.sglang.inside import model as sglang_model
from tests.conformance.moe_blocks import block as quantization_block
from tests.support.paths import MODELS
from tests.support.versions import since

ENGINE = "sglang"
CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1")


class Question(NamedTuple):
    model: str
    origin: str  # quantizer: the quant_method of the checkpoint; "online": --quantization fp8
    kind: str
    bits: int = 16
    group: int = -1
    symmetric: bool = True
    act_order: bool = False
    static: bool = False
    weight_only: bool = False
    dtype: str = "bfloat16"
    tp: int = 1
    ep: int = 1


# A few schemes of these models are asked, and all schemes of the first model.
NAMES = (
    "qwen3-30b-a3b",
    "mixtral-8x7b",
    "deepseek-v3",
    "deepseek-v2-lite",
    "gpt-oss-20b",
    "qwen3-next-80b-a3b",
    "glm-4.5-air",
    "qwen3-vl-30b-a3b",
    "qwen1.5-moe-a2.7b",
    "gemma-4-26b-a4b",
    "minimax-m2",
    "phi-3.5-moe",
    "nemotron-3-nano-30b-a3b",
    "ernie-4.5-21b-a3b",
    "granite-4.0-h-small",
    "deepseek-v3.2",
    "qwen3.6-35b-a3b",
)
# Asked from 0.5.11 on: 0.5.10 cannot read them with the transformers here, which is newer than its
# own.
READ_SINCE = {"0.5.11": ("gemma-4-26b-a4b", "granite-4.0-h-small", "qwen3.6-35b-a3b")}


def schemes() -> Iterator[Question]:
    yield Question("", "none", "unquantized")
    yield Question("", "online", "fp8_tensor", 8)
    yield Question("", "fp8", "fp8_tensor", 8)
    yield Question("", "fp8", "fp8_tensor", 8, static=True)
    yield Question("", "fp8", "fp8_block", 8, 128)
    yield Question("", "compressed-tensors", "fp8_tensor", 8, static=True)
    yield Question("", "compressed-tensors", "fp8_tensor", 8)
    yield Question("", "compressed-tensors", "fp8_token", 8)
    yield Question("", "compressed-tensors", "fp8_block", 8, 128)
    for origin, group in itertools.product(
        ("gptq", "auto-round", "compressed-tensors"), (32, 128, -1)
    ):
        yield Question("", origin, "wna16", 4, group)
    for origin in ("gptq", "auto-round", "compressed-tensors"):
        yield Question("", origin, "wna16", 8, 128)
        yield Question("", origin, "wna16", 4, 128, symmetric=False)
    yield Question("", "gptq", "wna16", 4, 128, act_order=True)
    yield Question("", "compressed-tensors", "wna16", 4, 128, act_order=True)
    for group in (32, 64, 128):
        yield Question("", "awq", "wna16", 4, group, symmetric=False)
    yield Question("", "awq", "wna16", 4, 128)
    yield Question("", "modelopt", "fp8_tensor", 8, static=True)
    yield Question("", "compressed-tensors", "nvfp4", 4, 16)
    yield Question("", "compressed-tensors", "nvfp4", 4, 16, weight_only=True)
    yield Question("", "modelopt", "nvfp4", 4, 16)
    yield Question("", "modelopt", "nvfp4", 4, 16, weight_only=True)
    yield Question("", "modelopt", "mxfp8", 8, 32)
    yield Question("", "mxfp4", "mxfp4", 4, 32, weight_only=True)
    yield Question("", "compressed-tensors", "mxfp4", 4, 32)
    yield Question("", "compressed-tensors", "int8", 8)
    yield Question("", "compressed-tensors", "w4a8", 4, 128)


def questions(version: str) -> Iterator[Question]:
    """Every question that this version is asked, in the order of its answers."""
    first_questions = list(_few_questions())
    unread_names = {
        name
        for first_version, names in READ_SINCE.items()
        if not since(version, first_version)
        for name in names
    }
    for scheme in schemes():
        base = scheme._replace(model=NAMES[0])
        if scheme.origin != "mxfp4":
            yield base
            yield base._replace(dtype="float16")
            yield base._replace(tp=8)
        if scheme.kind in ("unquantized", "wna16", "fp8_block", "nvfp4"):
            yield base._replace(tp=4)
            yield base._replace(tp=4, ep=4)
    for name in NAMES[1:]:
        if name not in unread_names:
            for scheme in first_questions:
                # The class of this pair has no layer of experts.
                if (name, scheme.origin) != (
                    "mixtral-8x7b",
                    "modelopt",
                ):
                    yield scheme._replace(model=name)
    for scheme in (
        Question("", "mxfp4", "mxfp4", 4, 32, weight_only=True),
        Question("", "compressed-tensors", "mxfp4", 4, 32),
    ):
        for tp in (1, 2, 4):
            yield scheme._replace(model="gpt-oss-20b", tp=tp)
    yield Question("gpt-oss-20b", "mxfp4", "mxfp4", 4, 32, weight_only=True, dtype="float16")
    yield Question("deepseek-v3", "fp8", "fp8_block", 8, 128, tp=8)
    yield Question("deepseek-v3", "fp8", "fp8_block", 8, 128, tp=8, ep=8)
    yield Question("mixtral-8x7b", "gptq", "wna16", 4, 128, tp=2)


def _few_questions() -> Iterator[Question]:
    yield Question("", "none", "unquantized")
    yield Question("", "online", "fp8_tensor", 8)
    yield Question("", "fp8", "fp8_block", 8, 128)
    yield Question("", "compressed-tensors", "fp8_token", 8)
    yield Question("", "gptq", "wna16", 4, 128)
    yield Question("", "compressed-tensors", "wna16", 4, 128)
    yield Question("", "awq", "wna16", 4, 128, symmetric=False)
    yield Question("", "modelopt", "fp8_tensor", 8, static=True)
    yield Question("", "modelopt", "nvfp4", 4, 16)
    yield Question("", "compressed-tensors", "nvfp4", 4, 16)


def answers(version: str) -> list[Any]:
    """Ask the engine that this process has booted."""
    return [answer(question) for question in questions(version)]


def config_of(q: Question) -> dict[str, Any]:
    """The published config.json, cut to one layer with experts."""
    config: dict[str, Any] = json.loads((MODELS / f"{q.model}.json").read_text())
    text = config.get("text_config", config)
    text["num_hidden_layers"] = 1
    if q.model.startswith("qwen3.6"):
        text["full_attention_interval"] = 4  # as published, though it does not decide shapes
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][-1:]
    for field, value in (
        ("first_k_dense_replace", 0),
        ("moe_layer_start_index", 0),
        ("mlp_only_layers", []),
        ("decoder_sparse_step", 1),
    ):
        if field in text:
            text[field] = value
    if "hybrid_override_pattern" in text:
        text["hybrid_override_pattern"] = "E"
    block = quantization_block(q)
    if block and q.origin == "mxfp4":
        block["modules_to_not_convert"] = [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ]
    return config | ({"quantization_config": block} if block else {})


def answer(q: Question, flags: Mapping[str, str] = MappingProxyType({})) -> Any:
    """flags: further arguments of the server."""
    options = {**flags} | ({"quantization": "fp8"} if q.origin == "online" else {})
    try:
        moe_layer = sglang_layers.configure(config_of(q), q.dtype, q.tp, q.ep, options)
    except sglang_layers.REFUSALS as error:
        return sglang_layers.refusal_text("method", error)
    try:
        with sglang_model.meta(q.dtype):
            model = sglang_layers.model(moe_layer)
        layer = next(module for module in model.modules() if hasattr(module, "moe_runner_config"))
        return sglang_layers.experts(layer)
    except sglang_layers.REFUSALS as error:
        return sglang_layers.refusal_text("none", error)
