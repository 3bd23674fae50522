"""Every linear layer that vLLM itself builds, per rank: of a model and a quantization {tp: [[name,
count, k, n, label]] or "error"}.

The model is built on the meta device in a tensor-parallel group of which only the size is real, so
every `create_weights` of the model's own class runs with its real sizes.
"""

from __future__ import annotations

import collections
import importlib
import re
from typing import Any

from gateway.engines.vllm.inside.model import build_from_config
from tests.conformance.layer_cases import CASES, TENSOR_PARALLEL, case

CAPABILITIES = ("9.0",)


def questions(_: str) -> list[tuple[str, str]]:
    return list(CASES)


def _label(method: Any) -> str:
    """The class that does the work, with the bits and the group where it knows them."""
    config = getattr(method, "quant_config", None)
    for source in (method, config):
        bits = getattr(source, "num_bits", None) or getattr(source, "weight_bits", None)
        if isinstance(bits, int):
            return f"{type(method).__name__} {bits} {getattr(source, 'group_size', None)}"
    return type(method).__name__


def _layers(model: Any) -> list[list[Any]]:
    base: Any = importlib.import_module("vllm.model_executor.layers.linear").LinearBase
    counts: collections.Counter[tuple[str, int, int, str]] = collections.Counter()
    for path, module in model.named_modules():
        name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
        method = getattr(module, "quant_method", None)
        if isinstance(module, base):
            size = getattr(module, "output_size_per_partition", None) or module.output_size
            inputs = getattr(module, "input_size_per_partition", None) or module.input_size
            counts[name, inputs, size, _label(getattr(module, "scheme", None) or method)] += 1
        elif "moe" in type(method).__name__.lower():
            config = module.moe_config
            inner = (
                getattr(config, "intermediate_size_per_partition_unpadded", None)
                or config.intermediate_size_per_partition
            )
            hidden_size = getattr(config, "hidden_dim_unpadded", None) or config.hidden_dim
            label = _label(method)
            name = name.removesuffix(".routed_experts")
            counts[f"{name}.w13", hidden_size, 2 * inner, label] += 1
            counts[f"{name}.w2", inner, hidden_size, label] += 1
    return [[name, count, k, n, label] for (name, k, n, label), count in sorted(counts.items())]


def answers(version: str) -> list[dict[str, Any]]:
    return [_answer(model, quant) for model, quant in questions(version)]


def _answer(model: str, quant: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for tp in TENSOR_PARALLEL:
        try:
            with build_from_config(case(model, quant), tp) as (_, engine_model):
                options[str(tp)] = _layers(engine_model)
        except Exception as error:  # an engine's refusal is an answer
            options[str(tp)] = f"{type(error).__name__}: {error}"[:400]
    return options
