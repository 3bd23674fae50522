"""Layers with sparse attention (DeepSeek V3.2, GLM-5) as SGLang's pool keeps them. Pure.

MemoryRules + AttentionGroups + Subject (the model on a GPU) + config.json -> AttentionGroups
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from gateway.domain import AttentionGroup
from gateway.engines.common.rules.subject import Subject
from gateway.engines.sglang.memory import SCALE_BYTES, SCALED_BLOCK, MemoryRules


def stored_groups(
    rules: MemoryRules,
    attention: Iterable[AttentionGroup],
    model: Subject,
    config: Mapping[str, Any],
) -> tuple[AttentionGroup, ...]:
    """The groups, those of a sparse attention with the sizes of their rows in the pool.

    config: the config of the text model.
    """
    fp8 = model.attention is not None and model.attention.kv_dtype.startswith("fp8")
    scaled = fp8 and any(check.refusal(model) is None for check in rules.scaled_latents)
    groups: list[AttentionGroup] = []
    for group in attention:
        if group.kind != "mla" or not group.index_dim:
            groups.append(group)
            continue
        stored_group = group.evolve(head_dim=_scaled_row(group)) if scaled else group
        numbers = group.numbers or range(group.layers)
        shared_count = shared_indices(config, numbers) if rules.shares_index else 0
        groups.append(stored_group.evolve(layers=group.layers - shared_count, numbers=()))
        if shared_count:
            groups.append(stored_group.evolve(layers=shared_count, index_dim=None, numbers=()))
    return tuple(groups)


def _scaled_row(group: AttentionGroup) -> int:
    """Bytes of an FP8 latent with its scales; the part with positions has two bytes an element.

    Source: calculate_mla_kv_cache_dim in srt/mem_cache/kv_cache_configurator.py.
    """
    latent = group.value_dim or group.head_dim
    return latent + latent // SCALED_BLOCK * SCALE_BYTES + 2 * (group.head_dim - latent)


def shared_indices(config: Mapping[str, Any], numbers: Collection[int]) -> int:
    """How many of these layers reuse the tokens that another layer chose.

    Source: dsa_layer_skips_topk in srt/configs/model_config.py. Wrong values count as absent.
    """
    types = config.get("indexer_types")
    pattern = config.get("index_topk_pattern")
    if isinstance(types, list):
        return sum(types[number : number + 1] == ["shared"] for number in numbers)
    factor = _positive(config.get("cli_factor"), 1)
    if factor > 1:
        return sum(number % factor != 0 for number in numbers)
    if isinstance(pattern, list | str):
        return sum(pattern[number : number + 1] in (["S"], "S") for number in numbers)
    period = _positive(config.get("index_topk_freq"), 1)
    first = _positive(config.get("index_skip_topk_offset"), 2) - 1
    return sum(max(number - first, 0) % period != 0 for number in numbers)


def _positive(value: object, default: int) -> int:
    return value if type(value) is int and value > 0 else default
