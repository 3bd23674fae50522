"""Traits of the KV cache of vLLM versions between those with rules, from the answers of their own
code.

A version without rules is forecast by the traits of the nearest one. Where these give another cache
than the version's code (cache_cases.py), its profile has the traits that give the same.
`scripts/engine-profile` writes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any

from gateway.domain import Engine
from gateway.domain.profile_diff import ProfileDiff
from gateway.engines.vllm.kv_cache import plan_cache_layout
from gateway.models.rank import Rank
from tests.conformance.cache_cases import Case, cases, read_answers
from tests.conformance.kv_questions import BATCHED, BYTES, LENGTHS, PLANNED
from tests.support.cached_models import MODELS

# Those that gateway/engines/vllm/kv_cache.py describes.
CACHE_TRAITS = frozenset(
    {
        "null_block",
        "pages_are_padded",
        "prefixes_of_states",
        "states_at_every_block",
        "states_within_prefill",
        "windows_of_more_batches",
    }
)


def is_right(
    case: Case, answer: Mapping[str, Any], capability: str, traits: Collection[str]
) -> bool:
    """Whether these traits give the bytes and requests that the engine gave."""
    forecast = plan_cache_layout(
        MODELS[case.model],
        Rank(tp=1, kv_dtype=answer["cache"], capability=capability),
        answer["preferred"],
        traits,
        caches_prefixes=case.prefixes,
    )
    requests = [(length, batch) for batch in BATCHED for length in LENGTHS]
    if [forecast.bytes_for(length, batch) for length, batch in requests] != answer["needed"]:
        return False
    room = [(kv, length, batch) for batch in BATCHED for kv in BYTES for length in PLANNED]
    return all(
        forecast.largest(kv, batch, length) == engine_value[0]
        if len(engine_value) == 1
        else [forecast.blocks(kv), round(forecast.requests(kv, length, batch), 6)] == engine_value
        for (kv, length, batch), engine_value in zip(room, answer["planned"], strict=True)
    )


def wrong_cases(version: str, traits: Collection[str]) -> list[str]:
    """Keys of the kept answers that these traits do not give."""
    return [
        f"{case.key} on {capability}"
        for capability, answers in read_answers().get(version, {}).items()
        for case in cases()
        if case.key in answers and not is_right(case, answers[case.key], capability, traits)
    ]


def cache_traits_of(version: str, near: Collection[str]) -> frozenset[str]:
    """The traits of the version's cache: those with the fewest wrong answers, and of these the ones
    that differ least from `near`, the traits of the nearest version."""
    traits = CACHE_TRAITS & {*near}
    subsets = [
        frozenset(subset)
        for size in range(len(CACHE_TRAITS) + 1)
        for subset in itertools.combinations(sorted(CACHE_TRAITS), size)
    ]
    return min(
        subsets,
        key=lambda subset: (
            len(wrong_cases(version, subset)),
            len(subset ^ traits),
            sorted(subset),
        ),
    )


def with_cache_traits(diff: ProfileDiff, near: Engine) -> ProfileDiff:
    """The difference, with the traits of the version's cache, if its code was asked."""
    if diff.kind != "vllm" or diff.version not in read_answers():
        return diff
    traits, remaining_traits = cache_traits_of(diff.version, near.traits), {*near.traits}
    other_traits = {*diff.traits} - CACHE_TRAITS
    dropped_traits = {*diff.without.get("traits", ())} - CACHE_TRAITS
    dropped_traits |= {name for name in near.traits if name in CACHE_TRAITS - traits}
    without = {field: names for field, names in diff.without.items() if field != "traits"}
    return diff.evolve(
        traits=tuple(sorted(other_traits | (traits - remaining_traits))),
        without=without | ({"traits": tuple(sorted(dropped_traits))} if dropped_traits else {}),
    )
