"""The KV cache that an engine counted: exact where it was asked, and in whole blocks between."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import AskedCache
from gateway.engines.common.memory.asked_cache import CountedCache
from gateway.engines.vllm.kv_cache import BlockTable, CacheLayout

PAGE = 4096


def answered_cache(cache: CacheLayout, longest: int, block: int) -> CountedCache:
    """The answer of an engine with this cache, as `cache` in gateway/engines/vllm/inside/answers.py
    asks."""
    blocks = sorted({round(2 ** (step / 4)) for step in range(80)})
    lengths = sorted({1, longest} | {count * block for count in blocks if count * block < longest})
    return CountedCache(
        AskedCache(
            block_bytes=cache.block_bytes, needed=tuple((n, cache.bytes_for(n, 0)) for n in lengths)
        )
    )


@given(st.integers(1, 200_000), st.integers(1, 200_000), st.sampled_from([16, 64, 1056]))
def test_nothing_is_lost_if_every_layer_keeps_every_token(
    longest: int, length: int, block: int
) -> None:
    cache = CacheLayout(block, PAGE, (BlockTable("full", 8, block, PAGE),), 1, 0)
    engine_cache, length = answered_cache(cache, longest, block), min(length, longest)
    assert engine_cache.bytes_for(length, 0) == cache.bytes_for(length, 0)
    room = 1000 * PAGE
    assert engine_cache.largest(room, 0, longest) == cache.largest(room, 0, longest)
    assert math.isclose(engine_cache.requests(room, length, 0), cache.requests(room, length, 0))


def test_a_token_of_a_long_request_costs_only_full_attention() -> None:
    tables = (
        BlockTable("full", 4, 16, PAGE),
        BlockTable("sliding", 4, 16, PAGE, window=1024),
        BlockTable("state", 4, 16, PAGE, states=2),
    )
    assert (
        answered_cache(CacheLayout(16, PAGE, tables, 1, 0), 131_072, 16).bytes_per_token
        == PAGE // 16
    )


def test_a_cache_that_keeps_nothing_has_room_for_everything() -> None:
    nothing = CountedCache(AskedCache(block_bytes=1, needed=()))
    assert nothing.largest(0, 0, 8192) == 8192
    assert nothing.bytes_for(8192, 0) == nothing.bytes_per_token == 0
    assert nothing.requests(0, 8192, 0) == math.inf


def test_bytes_that_no_token_gets_are_taken_from_the_pool_once() -> None:
    """As SGLang sets aside for images (mm_runtime_reservation_gb): beside the pool, whatever the
    requests are."""
    pool = AskedCache(block_bytes=100, needed=((1, 100), (1000, 100_000)))
    cache_with_fixed_bytes = CountedCache(pool.evolve(fixed=5_000))
    assert cache_with_fixed_bytes.bytes_per_token == 100
    assert cache_with_fixed_bytes.largest(25_000, 0, 1000) == 200
    assert cache_with_fixed_bytes.requests(25_000, 100, 0) == 2.0
    assert cache_with_fixed_bytes.largest(4_000, 0, 1000) == 0
    assert CountedCache(pool).largest(20_000, 0, 1000) == 200
