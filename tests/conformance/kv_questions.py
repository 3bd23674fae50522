"""The KV cache that vLLM itself plans for whole models: [[question, answer]] for every question of
questions(version).

The model is built on the meta device; its own layers tell their cache, and the engine's planner
says how many blocks fit into a number of bytes, how many requests, and which length it would
suggest. Run it through `python -m tests.conformance.engine`.
"""

from __future__ import annotations

import collections
import importlib
import json
import re
from typing import Any

from gateway.engines.vllm.inside.answers import (
    bytes_needed,
    group_caches,
    plan_cache,
    planner,
    specs,
)
from gateway.engines.vllm.inside.model import build_from_config, prepare
from tests.support import paths
from tests.support.versions import since


def machines(version: str) -> tuple[str, ...]:
    """From 0.33 on two GPUs are asked: the block that a backend prefers is one of its own."""
    return ("9.0", "8.6") if since(version, "0.33") else ("9.0",)


GIB = 1 << 30
MODELS = [
    "llama-3.2-1b",
    "qwen2.5-7b",
    "qwen3-30b-a3b",
    "mistral-7b-v0.1",
    "gemma-2-9b",
    "gemma-3-1b",
    "gemma-3-27b",
    "gpt-oss-20b",
    "olmo-3-7b",
    "command-r7b",
    "gemma-4-e4b",
    "gemma-4-26b-a4b",
    "gemma-4-31b",
    "deepseek-v2-lite",
    "deepseek-v3",
    "deepseek-v3.2",
    "qwen3-next-80b-a3b",
    "qwen3.6-35b-a3b",
    "qwen3.6-35b-a3b, mamba_ssm_dtype float32",
    "granite-4.0-h-micro",
    "granite-4.0-h-small",
    "nemotron-nano-9b-v2",
    "nemotron-3-nano-30b-a3b",
]
RECURRENT = MODELS[MODELS.index("qwen3-next-80b-a3b") :]
BATCHED = (2048, 8192)
LENGTHS = (1, 1000, 8192, 131072)
PLANNED = (8192, 131072)
BYTES = (GIB // 2, 3 * GIB + 12345, 20 * GIB)


def questions(version: str) -> list[tuple[str, int, str, bool | None]]:
    """(model, tensor parallel size, KV cache dtype, prefix caching or None for the default).

    Gemma 4 is asked from 0.33 on: versions before read its two head sizes in a way that today's
    transformers answers otherwise.
    """
    return [
        (model, tp, dtype, prefix)
        for model in MODELS
        if since(version, "0.33") or not model.startswith("gemma-4")
        for tp in (1, 2, 4, 8)
        for dtype in ("auto", "fp8")
        for prefix in ((None, False, True) if model in RECURRENT else (None,))
        if dtype == "auto" or (tp in (1, 4) and prefix is not False)
    ]


def config(model: str) -> dict[str, Any]:
    """The config.json of "NAME" or "NAME, FIELD VALUE"."""
    name, _, change = model.partition(", ")
    fields: dict[str, Any] = json.loads((paths.MODELS / f"{name}.json").read_text())
    if change:
        field, value = change.split()
        fields.get("text_config", fields)[field] = value
    return fields


def _preferred_block(configuration: Any) -> int:
    """Tokens of a block before states make it larger: those that the backend of the first attention
    layer prefers."""
    for layer in configuration.compilation_config.static_forward_context.values():
        backend = layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else None
        if backend is not None and not hasattr(layer, "mamba_type"):
            block_size: int = backend.get_preferred_block_size(
                configuration.cache_config.block_size
            )
            return block_size
    return 0


def _plan_cache(
    plans: Any, configuration: Any, specs: dict[str, Any], groups: Any, memory: int, length: int
) -> list[Any]:
    """[number of blocks, requests at once], or [the length it suggests] where a request does not
    fit."""
    configuration.model_config.max_model_len = length
    try:
        cache = plan_cache(plans, configuration, specs, groups, memory)
    except ValueError as error:
        suggestion = re.search(r"estimated maximum model length is (\d+)", str(error))
        if "KV cache is needed" not in str(error) and not suggestion:
            raise
        return [int(suggestion[1]) if suggestion else 0]
    utils: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
    return [
        cache.num_blocks,
        round(utils.get_max_concurrency_for_kv_cache_config(configuration, cache), 6),
    ]


def answer(configuration: Any) -> dict[str, Any]:
    """preferred, block: tokens of a block; mode: of states; layers: [kind, tokens of a block, bytes
        of a page, count];
    groups: [tokens, page, count]; needed: bytes of one request of each of LENGTHS, for each of
    BATCHED; planned: see _planned, for each of BATCHED, BYTES and PLANNED."""
    recurrent = configuration.model_config.is_hybrid
    block_size = (
        _preferred_block(configuration)
        if recurrent and hasattr(configuration.cache_config, "skip_page_size_padded")
        else 16
    )
    kept_specs = specs(configuration)
    plans = planner()
    groups = group_caches(plans, configuration, kept_specs)
    counts = collections.Counter(
        (type(spec).__name__, spec.block_size, spec.page_size_bytes) for spec in kept_specs.values()
    )
    row: dict[str, Any] = {
        "preferred": block_size if recurrent else configuration.cache_config.block_size,
        "mode": configuration.cache_config.mamba_cache_mode,
        "cache": configuration.cache_config.cache_dtype,
        "layers": [[*key, count] for key, count in sorted(counts.items())],
        "groups": [[group.kv_cache_spec.block_size, group.kv_cache_spec.page_size_bytes,
            len(group.layer_names)] for group in groups],
        "needed": [],
        "planned": [],
    }  # fmt: skip
    for tokens in BATCHED:
        configuration.scheduler_config.max_num_batched_tokens = tokens
        row["needed"] += [bytes_needed(plans, configuration, groups, length) for length in LENGTHS]
        row["planned"] += [
            _plan_cache(plans, configuration, kept_specs, groups, memory, length)
            for memory in BYTES
            for length in PLANNED
        ]
    return row


def answers(version: str) -> list[Any]:
    rows: list[Any] = []
    prepare()
    for model, tp, dtype, prefix in questions(version):
        arguments: dict[str, Any] = {"kv_cache_dtype": dtype, "enable_prefix_caching": prefix}
        try:
            with build_from_config(config(model), tp, **arguments) as (configuration, _):
                rows.append(answer(configuration))
        except Exception as error:  # an engine's refusal is an answer
            rows.append(" ".join(f"{type(error).__name__}: {error}".split(" [type=")[0].split()))
    return rows
