"""SGLang's pool of KV cache in the words of engines/vllm/kv_cache.py, and the properties that its
memory settings ask for."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import Plan, Wish
from gateway.engines.common.layers.build import build
from gateway.engines.sglang.kv_cache import TokenPool, read_traits
from tests.support.planning import decide
from tests.support.published import published_model
from tests.support.token_pools import PROFILES, pool
from tests.support.versions import SGLANG, SGLANG_REF

GIB = 1024**3


def planned_on(ref: str, name: str) -> Plan:
    engine = PROFILES.engine(ref)
    wish = Wish(name="m", tensor_parallel=1)
    return decide(
        published_model(name),
        PROFILES.hardware("8xh100"),
        [engine],
        wish,
        rules=PROFILES.rules([engine]),
    ).plans[0]


def test_a_token_costs_its_keys_and_values() -> None:
    # 32 layers, 8 KV heads of 128, keys and values of two bytes.
    assert pool("llama-3.1-8b").bytes_per_token == 32 * 8 * 128 * 2 * 2
    assert pool("llama-3.1-8b", tp=2).bytes_per_token == 32 * 4 * 128 * 2 * 2
    assert pool("llama-3.1-8b", tp=16).bytes_per_token == 32 * 1 * 128 * 2 * 2
    assert pool("llama-3.1-8b", element_bytes=1).bytes_per_token == 32 * 8 * 128 * 2


def test_a_latent_is_whole_on_every_rank() -> None:
    single_pool, four = pool("deepseek-v2-lite"), pool("deepseek-v2-lite", tp=4)
    assert single_pool.bytes_per_token == four.bytes_per_token == 27 * (512 + 64) * 2


def test_recurrent_layers_take_a_share_of_the_bytes() -> None:
    hybrid = pool("qwen3-next-80b-a3b")
    tokens = hybrid.tokens(10 * GIB)
    assert tokens is not None
    plain = 12 * 2 * 256 * 2 * 2  # its 12 full layers alone
    assert tokens == math.floor(math.floor(10 * GIB / (1 + hybrid.rules.mamba_ratio)) / plain)


def test_a_window_without_a_pool_of_its_own_keeps_every_token() -> None:
    plan = planned_on(SGLANG_REF, "gemma-2-9b")
    # 42 layers, 8 KV heads of 256, keys and values of two bytes.
    assert plan.memory.kv_bytes_per_token == 42 * 8 * 256 * 2 * 2
    # Half of gpt-oss's layers have a window, and a pool with 0.8 of the tokens.
    plan = planned_on(SGLANG_REF, "gpt-oss-20b")
    assert plan.memory.kv_bytes_per_token == int(12 * 1.8 * 8 * 64 * 2 * 2)


def test_a_sparse_index_takes_its_keys_and_scales() -> None:
    # 61 layers: 128 bytes of FP8 keys and a scale of four bytes, beside the latent.
    assert pool("deepseek-v3.2").bytes_per_token == 61 * ((512 + 64) * 2 + 128 + 4)
    assert pool("deepseek-v3.2", tp=8).bytes_per_token == pool("deepseek-v3.2").bytes_per_token


def test_an_index_without_a_latent_is_not_known() -> None:
    full = pool("llama-3.1-8b").attention[0].evolve(index_dim=128)
    sparse = TokenPool(pool("llama-3.1-8b").rules, (full,), 1, 2)
    assert sparse.tokens(GIB) is None
    assert sparse.bytes_per_token == 0


def test_a_model_without_a_cache_is_bound_by_its_own_limit() -> None:
    encoder = pool("bge-m3")
    assert encoder.bytes_per_token == 0
    assert encoder.largest(0, 2048, 8192) == 8192
    assert encoder.requests(0, 8192, 2048) == math.inf


@given(
    name=st.sampled_from(
        ["llama-3.1-8b", "qwen3-next-80b-a3b", "gpt-oss-20b", "deepseek-v2-lite", "gemma-3-27b"]
    ),
    version=st.sampled_from(SGLANG),
    tp=st.sampled_from([1, 2, 4]),
    size=st.integers(0, 200 * GIB),
    more=st.integers(0, GIB),
)
def test_more_bytes_hold_no_fewer_tokens(
    name: str, version: str, tp: int, size: int, more: int
) -> None:
    kept_pool = pool(name, version, tp)
    least = kept_pool.largest(size, 2048, 10**7)
    assert 0 <= least <= kept_pool.largest(size + more, 2048, 10**7) <= 10**7
    assert kept_pool.requests(size, max(1, least), 2048) >= (1 if least else 0)
    assert kept_pool.bytes_for(least, 2048) <= size + kept_pool.bytes_per_token * (
        1 + least // 1000
    )


def test_the_settings_read_towers_and_attention_of_a_model() -> None:
    text = read_traits(published_model("llama-3.1-8b"))
    assert (text.architecture, text.uses_mla, text.has_towers, text.has_vision) == (
        "LlamaForCausalLM",
        False,
        False,
        False,
    )
    assert read_traits(published_model("deepseek-v3")).uses_mla
    seeing = read_traits(published_model("gemma-3-27b"))
    assert (seeing.has_towers, seeing.has_vision, seeing.vision_layers, seeing.vision_hidden) == (
        True,
        True,
        27,
        1152,
    )
    absurd = read_traits(
        published_model("gemma-3-27b").evolve(
            config={"vision_config": {"num_hidden_layers": 10**9, "hidden_size": "x"}}
        )
    )
    assert (absurd.vision_layers, absurd.vision_hidden) == (None, None)


@pytest.mark.parametrize(
    ("name", "tp", "expected_bytes"),
    [
        ("granite-4.0-h-micro", 1, 161_714_904),
        ("granite-4.0-h-small", 1, 323_365_935),
        ("nemotron-3-nano-30b-a3b", 1, 103_728_365),
        ("nemotron-nano-9b-v2", 1, 303_723_151),
        ("qwen3-next-80b-a3b", 4, 40_784_605),
    ],
)
def test_a_state_has_the_size_of_the_engines_answer(
    name: str, tp: int, expected_bytes: int
) -> None:
    """expected_bytes: bytes of both pools for each state, as the inquiry has them from 0.5.23."""
    pool_of_rank = pool(name, tp=tp)
    share = pool_of_rank.rules.mamba_ratio / (1 + pool_of_rank.rules.mamba_ratio)
    assert pool_of_rank.state_bytes / share == pytest.approx(expected_bytes, rel=0.004)


def test_a_number_of_states_by_flags_leaves_the_rest_to_tokens() -> None:
    # Qwen3.5-397B-A17B in NVFP4 on four RTX PRO 6000, with 128 requests, no radix cache, states in
    # bfloat16 and an FP8 cache: --mem-fraction-static 0.8 makes 2.2 million tokens
    # (github.com/SemiAnalysisAI/InferenceX, qwen3.5_fp4_rtx6000pro_sglang.sh, SGLang 0.5.16).
    hybrid = pool("qwen3.6-35b-a3b", element_bytes=1)
    numbered_pool = hybrid.evolve(slots=1, most_states=128)
    tokens = numbered_pool.tokens(10 * GIB)
    assert tokens is not None
    # Ten layers have two heads of keys and values.
    assert numbered_pool.bytes_per_token == 10 * 2 * 256 * 2
    assert tokens == (10 * GIB - 128 * hybrid.state_bytes) // numbered_pool.bytes_per_token
    narrow = numbered_pool.evolve(matrices="bfloat16")
    assert narrow.state_bytes < numbered_pool.state_bytes
    assert (narrow.tokens(10 * GIB) or 0) > tokens


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3.6-35b-a3b"])
def test_no_more_tokens_than_a_flag_allows(name: str) -> None:
    usual = pool(name)
    limited_pool = usual.evolve(most_tokens=4100, page=64)
    assert (usual.tokens(10 * GIB) or 0) > 4096
    assert limited_pool.tokens(10 * GIB) == 4096
    assert limited_pool.tokens(10**6) == usual.evolve(page=64).tokens(10**6)
    assert limited_pool.bytes_per_token == usual.bytes_per_token


def test_the_users_requests_number_the_states_without_a_radix_cache() -> None:
    def tokens(**args: Any) -> int:
        engine = PROFILES.engine(SGLANG_REF)
        wish = Wish(name="m", tensor_parallel=1, text_only=True, args=args)
        spec = published_model("qwen3.5-9b")
        machine = PROFILES.hardware("8xh100")
        plan = decide(spec, machine, [engine], wish, rules=PROFILES.rules([engine])).plans[0]
        assert plan.memory.kv_tokens is not None
        return plan.memory.kv_tokens

    shared_tokens = tokens(**{"disable-radix-cache": True})
    small_tokens = tokens(**{"disable-radix-cache": True, "max-running-requests": 8})
    large_tokens = tokens(**{"disable-radix-cache": True, "max-running-requests": 64})
    assert small_tokens > large_tokens > shared_tokens
    flags = {"disable-radix-cache": True, "max-running-requests": 64, "mamba-ssm-dtype": "bfloat16"}
    assert tokens(**flags) > large_tokens


@pytest.mark.parametrize("version", SGLANG)
def test_layers_that_read_the_keys_of_others_have_a_place_of_their_own(version: str) -> None:
    """A GB10 with 0.5.18 had 79.94 GiB in pools for 997,846 tokens (full) and 798,276 (sliding)."""
    engine = PROFILES.engine(f"sglang=={version}")
    spec = published_model("gemma-4-e4b")
    groups = build(spec, engine.traits).attention
    layers = {group.kind: group.layers for group in groups if group.window or group.kind == "full"}
    assert layers == {"full": 7, "sliding": 35}
    # Keys and values of two bytes; 2 KV heads of 512 and 256.
    sizes = [
        2 * 2 * group.kv_heads * group.head_dim * group.layers
        for group in groups
        if group.head_dim in (256, 512)
    ]
    assert sorted(sizes) == [28_672, 71_680]
