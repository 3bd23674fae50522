"""Whole models, as vLLM itself builds them: kernel of every layer, backend of every attention
layer, bytes on one rank, KV cache.

A question is (model, quantization, capability); only those of the capability that is booted are
answered, the rest are null. An answer has, for each of TENSOR_PARALLEL,

    layers     "NAME KERNEL KxN COUNT": sizes and kernels on one rank; where ranks differ, one for
               each of them, divided by "|"
    attention  "KIND HEAD_SIZE BACKEND [VERSION] COUNT" of its layers, joined by ", ", but those
               that read another layer's cache; with the version of FlashAttention
    weights    bytes of all parameters of one rank
    kv         "BYTES_OF_A_BLOCK: KIND TOKENS ...", with the tokens of a block in each of the
               cache's groups; "" without a cache

or null where the engine refuses, and `refused` says why, by the number of ranks.
"""

from __future__ import annotations

import collections
import importlib
import re
from collections.abc import Iterable
from typing import Any

from gateway.engines.vllm.inside.answers import (
    attention,
    block_bytes,
    group_caches,
    kernels,
    plan_cache,
    planner,
    pretend_bitsandbytes,
    specs,
    stand_in_for_packages,
)
from gateway.engines.vllm.inside.model import build_from_config, prepare
from tests.conformance.layer_cases import TENSOR_PARALLEL
from tests.conformance.model_cases import OLDER_BEFORE, ONLINE, config, machines, pooling, triples

__all__ = ["OLDER_BEFORE", "answers", "machines", "questions"]

_KV_BYTES = 8 << 30
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def questions(version: str) -> list[tuple[str, str, str]]:
    return triples(version)


def answers(version: str) -> list[dict[str, Any] | None]:
    prepare()
    stand_in_for_packages()
    pretend_bitsandbytes()
    capability: Any = importlib.import_module(
        "vllm.platforms"
    ).current_platform.get_device_capability()
    text = f"{capability.major}.{capability.minor}"
    return [
        _answer(model, quant) if question_text == text else None
        for model, quant, question_text in questions(version)
    ]


def _answer(model: str, quant: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {"runner": "pooling"} if pooling(model) else {}
    arguments |= {"quantization": "fp8"} if quant == ONLINE else {}
    return answer_of(config(model, quant), TENSOR_PARALLEL, **arguments)


def answer_of(
    config: dict[str, Any], ranks: Iterable[int], *, cache: bool = True, **arguments: Any
) -> dict[str, Any]:
    """The answer for a config.json on each number of ranks; without `cache`, kv is not asked."""
    layers: dict[int, dict[str, tuple[str, int, int]]] = {}
    answer: dict[str, Any] = {"layers": [], "attention": [], "weights": [], "kv": [], "refused": {}}
    for tp in ranks:
        attention = weights = kv = None
        try:
            with build_from_config(config, tp, **arguments) as (configuration, whole):
                layers[tp] = layers_of(whole, configuration)
                attention = _attention(whole, configuration)
                weights = sum(
                    parameter.numel() * parameter.element_size() for parameter in whole.parameters()
                )
                kv = _kv(configuration) if cache else None
        except Exception as error:  # an engine's refusal is an answer
            layers.pop(tp, None)
            attention = weights = kv = None
            answer["refused"][str(tp)] = _error_text(error)
        answer["attention"].append(attention)
        answer["weights"].append(weights)
        answer["kv"].append(kv)
    for name in ("attention", "kv"):  # mostly all ranks have the same
        refusals = {refusal for refusal in answer[name] if refusal is not None}
        answer[name] = answer[name] if len(refusals) > 1 else min(refusals, default=None)
    answer["layers"] = rows_of(layers)
    return {name: value for name, value in answer.items() if value}


def _error_text(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".split(" [type=")[0].removeprefix(
        "ValidationError: 1 validation error for "
    )
    return " ".join(text.split())[:100]


def rows_of(layers: dict[int, dict[str, tuple[str, int, int]]]) -> list[str]:
    rows: collections.Counter[str] = collections.Counter()
    for path in next(iter(layers.values()), {}):
        kernel, k, n = (
            "|".join(_unique_values(shapes))
            for shapes in zip(*(ranks[path] for ranks in layers.values()), strict=True)
        )
        rows[f"{_NUMBER.sub('*', path).removesuffix('.routed_experts')} {kernel} {k}x{n}"] += 1
    return [f"{row} {count}" for row, count in sorted(rows.items())]


def _unique_values(values: Iterable[Any]) -> list[str]:
    """One where all are alike."""
    texts = [str(value) for value in values]
    return texts[:1] if len(set(texts)) == 1 else texts


def layers_of(whole: Any, configuration: Any) -> dict[str, tuple[str, int, int]]:
    dtype = str(configuration.model_config.dtype).removeprefix("torch.")
    return {path: (kernel, k, n) for path, (kernel, k, n, _) in kernels(whole, dtype).items()}


def _attention(whole: Any, configuration: Any) -> str:
    rows = [
        (row["kind"], row["head_dim"], row["backend"], row["version"] or "", row["layers"])
        for row in attention(whole, configuration)
    ]
    return ", ".join(" ".join(str(word) for word in row if word != "") for row in rows)


def _kv(configuration: Any) -> str:
    kept_specs = specs(configuration)
    if not kept_specs:
        return ""
    plans = planner()
    groups = group_caches(plans, configuration, kept_specs)
    configuration.model_config.max_model_len = 16
    cache = plan_cache(plans, configuration, kept_specs, groups, _KV_BYTES)
    size = block_bytes(groups)
    if cache.num_blocks != _KV_BYTES // size:
        raise RuntimeError(f"a block is not {size} bytes: {cache.num_blocks} are in {_KV_BYTES}")
    kinds = collections.Counter(
        (type(group.kv_cache_spec).__name__, group.kv_cache_spec.block_size) for group in groups
    )
    text = " ".join(
        f"{count}*{kind.removesuffix('Spec')}/{block}"
        for (kind, block), count in sorted(kinds.items())
    )
    return f"{size}: {text}"
