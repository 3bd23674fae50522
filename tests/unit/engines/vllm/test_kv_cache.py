"""The KV cache against the engine's own planner: block sizes, pages, bytes of a request, requests
at once, longest request."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import AttentionGroup, Recurrent
from gateway.engines.vllm.kv_cache import plan_cache_layout, state_bytes
from gateway.models.rank import Rank
from tests.conformance.kv_questions import LENGTHS
from tests.support.cached_models import MODELS, full, recurrent, sliding
from tests.support.published import TRAITS, model_from_config, published_model
from tests.support.stateful_cases import QWEN_27B
from tests.support.versions import NEWEST_VLLM

READ = [
    name
    for name in MODELS
    if not name.startswith(("granite", "nemotron", "gemma-3-27b")) and ", " not in name
]


@pytest.mark.parametrize("name", READ)
def test_the_cache_of_a_read_config_is_that_of_the_known_model(name: str) -> None:
    read, config_cache = (
        plan_cache_layout(attention, Rank(tp=2, capability="9.0"), 16, TRAITS[NEWEST_VLLM])
        for attention in (published_model(name).attention, MODELS[name])
    )
    assert read.bytes_per_token == config_cache.bytes_per_token
    assert [read.bytes_for(length, 2048) for length in LENGTHS] == [
        config_cache.bytes_for(length, 2048) for length in LENGTHS
    ]


def test_a_state_is_kept_before_the_first_token() -> None:
    kv_cache = plan_cache_layout(MODELS["qwen3.6-35b-a3b"], Rank(capability="8.6"), 16, ())
    assert (kv_cache.block_tokens, kv_cache.block_bytes) == (544, 10 * 1114112)
    assert kv_cache.state_bytes == 3 * kv_cache.block_bytes
    assert kv_cache.bytes_per_token * 544 == kv_cache.block_bytes
    assert kv_cache.bytes_for(1, 2048) == kv_cache.state_bytes + kv_cache.block_bytes
    lone_cache = plan_cache_layout(MODELS["qwen3.6-35b-a3b"][1:], Rank(capability="8.6"), 16, ())
    assert (lone_cache.bytes_per_token, lone_cache.bytes_for(100000, 2048)) == (0, 30 * 1097728)


@pytest.mark.parametrize(
    ("kv_dtype", "drafts", "block"),
    [("fp8", 0, 1568), ("fp8", 3, 1600), ("nvfp4", 0, 2784), ("nvfp4", 3, 2848)],
)
def test_a_convolution_keeps_the_inputs_of_drafted_tokens(
    kv_dtype: str, drafts: int, block: int
) -> None:
    """Blocks that owners of Qwen3.8-27B report: 1600 and 2848 with three drafted tokens (vllm pull
    request 46329)."""
    attention = model_from_config(QWEN_27B).attention
    rank = Rank(kv_dtype=kv_dtype, capability="8.6")
    layout = plan_cache_layout(attention, rank, 16, TRAITS["0.26.0"], drafts=drafts)
    assert layout.block_tokens == block


def test_a_convolution_has_groups_enough_for_every_rank() -> None:
    # mamba2_state_shape, with 1 group on 4 ranks: (4096 + 2 * 4 * 128) / 4 channels; 16 heads of 64
    # x 128.
    group = MODELS["granite-4.0-h-micro"][1].recurrent
    assert group is not None
    assert state_bytes(group, 4, "bfloat16") == 3 * 1280 * 2 + 16 * 64 * 128 * 2
    assert (
        state_bytes(group.evolve(kind="mamba1", groups=0), 4, "bfloat16")
        == 3 * 1088 * 2 + 16 * 64 * 128 * 2
    )


@pytest.mark.parametrize(
    ("model", "dtype", "sizes"),
    [
        ("llama-3.2-1b", "int8_per_token_head", [278_528, 17_547_264, 142_606_336]),
        ("gemma-3-1b", "int4_per_token_head", [219_648, 7_552_512, 37_948_416]),
        ("qwen3.6-35b-a3b", "int8_per_token_head", [113_152_000, 113_152_000, 192_358_400]),
    ],
)
def test_a_cache_may_keep_a_scale_for_each_head(model: str, dtype: str, sizes: list[int]) -> None:
    """The bytes of requests of 1, 1000 and 8192 tokens are the answers of vLLM 0.33.0 itself for
    compute capability 9.0."""
    kv_cache = plan_cache_layout(
        MODELS[model], Rank(kv_dtype=dtype, capability="9.0"), 16, TRAITS[NEWEST_VLLM]
    )
    assert [kv_cache.bytes_for(length, 2048) for length in LENGTHS[:3]] == sizes


def test_more_stages_have_more_batches_in_flight() -> None:
    single_stage, three = (
        plan_cache_layout(
            MODELS["mistral-7b-v0.1"],
            Rank(pp=pp, capability="9.0"),
            16,
            ("windows_of_more_batches",),
        )
        for pp in (1, 3)
    )
    assert (single_stage.blocks_for(32768, 2048), three.blocks_for(32768, 2048)) == (513, 769)


def test_pages_that_do_not_divide_are_padded_or_refused() -> None:
    groups = (full(4, 1, 192), sliding(4, 1, 128, 512))
    padded_cache = plan_cache_layout(groups, Rank(capability="9.0"), 16, ("pages_are_padded",))
    assert (padded_cache.refusal, padded_cache.block_bytes) == (None, 4 * 16 * 2 * 192 * 2)
    assert "do not divide" in (
        plan_cache_layout(groups, Rank(capability="9.0"), 16, ()).refusal or ""
    )


def test_towers_and_encoders_keep_nothing() -> None:
    tower = full(27, 16, 72, causal=False).evolve(kind="vision")
    kv_cache = plan_cache_layout(
        [tower, full(2, 1, 64).evolve(kind="encoder")], Rank(capability="9.0"), 16, ()
    )
    assert (
        kv_cache.bytes_per_token,
        kv_cache.bytes_for(512, 2048),
        kv_cache.largest(0, 2048, 512),
    ) == (
        0,
        0,
        512,
    )
    assert kv_cache.requests(0, 512, 2048) == math.inf
    seen_cache = plan_cache_layout([tower, *MODELS["llama-3.2-1b"]], Rank(capability="9.0"), 16, ())
    assert seen_cache == plan_cache_layout(MODELS["llama-3.2-1b"], Rank(capability="9.0"), 16, ())


SIZES = st.integers(0, 300) | st.sampled_from([2**31, 10**12])
STATES = st.builds(
    Recurrent, kind=st.sampled_from(["gdn", "kda", "mamba1", "mamba2"]), heads=SIZES, rows=SIZES,
    columns=SIZES, groups=SIZES,
    conv_channels=SIZES, conv_kernel=st.integers(0, 9), chunk=st.none() | st.integers(1, 2**20),
    dtype=st.sampled_from([None, "float32"]),
)  # fmt: skip
GROUPS = st.builds(
    AttentionGroup, kind=st.sampled_from(["full", "sliding", "mla", "recurrent", "encoder",
        "vision"]), layers=SIZES, heads=SIZES,
    kv_heads=SIZES, head_dim=SIZES, value_dim=st.none() | SIZES, window=st.none() | SIZES,
    index_dim=st.none() | SIZES,
    recurrent=st.none() | STATES,
)  # fmt: skip


@given(
    st.lists(GROUPS, max_size=4), st.integers(1, 64),
    st.sampled_from(["auto", "fp8", "fp8_ds_mla"]),
    st.sampled_from(list(TRAITS.values())), st.none() | st.booleans(), st.integers(0, 10**13),
    st.integers(0, 2**22),
)  # fmt: skip
def test_no_model_breaks_the_arithmetic(
    groups: list[AttentionGroup],
    tp: int,
    kv_dtype: str,
    traits: tuple[str, ...],
    prefixes: bool | None,
    kv: int,
    limit: int,
) -> None:
    kv_cache = plan_cache_layout(
        groups,
        Rank(tp=tp, kv_dtype=kv_dtype, capability="9.0"),
        16,
        traits,
        caches_prefixes=prefixes,
    )
    longest = kv_cache.largest(kv, 2048, limit)
    assert 0 <= longest <= limit
    assert longest == 0 or kv_cache.bytes_for(longest, 2048) <= kv
    assert longest == limit or kv_cache.bytes_for(longest + 1, 2048) > kv - kv_cache.block_bytes
    assert min(kv_cache.bytes_per_token, kv_cache.state_bytes) >= 0
    assert kv_cache.requests(kv, 100, 2048) >= 0


def test_keys_of_an_encoder_are_kept_for_a_batch_of_any_length() -> None:
    """Whisper tiny on one rank, as vLLM plans it: one group of each kind."""
    decoder = full(4, 6, 64)
    kept_cache = plan_cache_layout(
        (decoder, decoder.evolve(kind="cross")), Rank(), 16, TRAITS[NEWEST_VLLM]
    )
    assert kept_cache.block_bytes == 98304
    assert kept_cache.bytes_per_token == 98304 // 16
    short, long = (kept_cache.blocks_for(length, 1500) for length in (16, 448))
    assert (short, long) == (1 + 94, 28 + 94)


def test_an_indexer_beside_keys_and_values_keeps_keys_of_its_own() -> None:
    """MiniMax M3: FullAttentionSpec, and MLAAttentionSpec of its indexer's keys in 16 bits."""
    plain = plan_cache_layout((full(4, 4, 128),), Rank(), 128, TRAITS[NEWEST_VLLM])
    sparse = plan_cache_layout((full(4, 4, 128, index_dim=128),), Rank(), 128, TRAITS[NEWEST_VLLM])
    assert sparse.bytes_per_token - plain.bytes_per_token == 4 * 128 * 2


@pytest.mark.parametrize(
    ("version", "gib", "caches_prefixes", "tokens"),
    [
        ("0.25.1, issue 849, two RTX 5090", 14.68, False, 841_541),
        ("0.25.1, issue 642, two RTX 3090", 11.05, True, 623_873),
        ("0.24.0, issue 594, two RTX 3090", 5.33, True, 300_220),
    ],
)
def test_each_drafted_token_takes_a_state_of_a_request(
    version: str, gib: float, caches_prefixes: bool, tokens: int
) -> None:
    """Owners of Qwen3.6-27B on two GPUs with a drafting layer of three tokens, of
    github.com/noonghunna/club-3090. Their logs round the pool to 0.01 GiB."""
    attention = (full(17, 4, 256), recurrent(48, "gdn", 48, 128, 128, 16, dtype="float32"))
    rank = Rank(tp=2, kv_dtype="fp8", capability="8.6")
    drafting = plan_cache_layout(
        attention, rank, 16, TRAITS["0.26.0"], caches_prefixes=caches_prefixes, drafts=3
    )
    assert drafting.block_tokens == 1600
    pools = (int((gib + error) * 1024**3) for error in (-0.005, 0, 0.005))
    assert tokens in {int(drafting.requests(pool, 262144, 8192) * 262144) for pool in pools}
    plain = plan_cache_layout(
        attention, rank, 16, TRAITS["0.26.0"], caches_prefixes=caches_prefixes
    )
    states = plain.tables[1].count
    assert drafting.blocks_for(1000, 8192) == plain.blocks_for(1000, 8192) + 3 * states
    plain_blocks = plain.state_bytes // plain.block_bytes
    assert drafting.state_bytes == (plain_blocks + 3 * states) * drafting.block_bytes


def test_a_state_for_every_block_has_further_ones_for_drafted_tokens() -> None:
    attention = (full(4, 8, 128), recurrent(8, "mamba2", 64, 64, 128, 8))
    traits = {"states_at_every_block"}
    plain = plan_cache_layout(attention, Rank(), 16, traits, caches_prefixes=True)
    drafting = plan_cache_layout(attention, Rank(), 16, traits, caches_prefixes=True, drafts=2)
    states = sum(table.count for table in plain.tables if table.kind == "state")
    assert states
    assert drafting.blocks_for(5000, 2048) == plain.blocks_for(5000, 2048) + 2 * states
