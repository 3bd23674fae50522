"""SGLang's pools with layers that draft: figures of a public start, and flags of the plan.

github.com/sgl-project/sglang/pull/32468: Qwen3.8-27B on two 3090 with SGLang 0.5.19, four steps of
drafting and one request, before and after the vocabulary of the draft was freed earlier.
"""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain.units import GIB
from gateway.engines.common.layers.build import build
from gateway.engines.common.speculative.mtp import drafting_groups, vocabulary_bytes
from gateway.engines.sglang.kv_cache import TokenPool
from gateway.models.rank import Rank
from tests.support.published import config, model_from_config
from tests.support.reported_plans import make_decision
from tests.support.token_pools import pool
from tests.support.versions import SGLANG_REF

QWEN_27B: dict[str, Any] = config(
    "qwen3.5-9b",
    text_config=config("qwen3.5-9b")["text_config"]
    | {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
        "num_attention_heads": 24, "linear_num_value_heads": 48,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16,
    },
    vision_config=config("qwen3.5-9b")["vision_config"] | {"out_hidden_size": 5120},
)  # fmt: skip
SPEC = model_from_config(QWEN_27B)
# Bytes that the pools of the report had: those that explain its 55 states and 409,552 tokens.
POOL_BYTES = 9_717_000_000
# Embedding and head of the draft on one of two ranks.
COPIES = 2 * 124_160 * 5120 * 2


def draft_pool(verified: int = 5, requests: int = 1, **changes: Any) -> TokenPool:
    return TokenPool(
        pool("llama-3.1-8b", "0.5.23").rules,
        (*build(SPEC).attention, *drafting_groups(SPEC, 1)),
        2, 1, slots=5, matrices="bfloat16", verified_tokens=verified, most_requests=requests,
        **changes,
    )  # fmt: skip


def test_states_of_drafted_tokens_leave_the_states_and_tokens_of_the_report() -> None:
    assert draft_pool().states(POOL_BYTES) == 55
    assert draft_pool().tokens(POOL_BYTES) == pytest.approx(409_552, rel=0.002)


def test_a_smaller_number_of_states_leaves_more_tokens() -> None:
    assert draft_pool(most_states=35).tokens(POOL_BYTES) == pytest.approx(454_616, rel=0.002)


def test_the_vocabulary_of_the_draft_costs_a_quarter_of_the_tokens() -> None:
    assert vocabulary_bytes(SPEC, Rank(tp=2, dtype="bfloat16")) == COPIES
    assert draft_pool().states(POOL_BYTES + COPIES) == 71
    assert draft_pool().tokens(POOL_BYTES + COPIES) == pytest.approx(519_753, rel=0.003)


def test_more_requests_keep_more_states_of_drafted_tokens() -> None:
    few_tokens = draft_pool().tokens(POOL_BYTES)
    many_tokens = draft_pool(requests=8).tokens(POOL_BYTES)
    assert few_tokens is not None
    assert many_tokens is not None
    states_bytes = 7 * 5 * draft_pool().state_bytes
    assert few_tokens - many_tokens == pytest.approx(states_bytes / (17 * 1024), rel=0.01)


def test_a_model_without_states_pays_for_its_drafting_layer_alone() -> None:
    plain = pool("llama-3.1-8b", "0.5.23")
    assert plain.evolve(verified_tokens=4).tokens(GIB) == plain.tokens(GIB)


def test_a_plan_drafts_by_the_flags_of_sglang() -> None:
    drafted = make_decision(QWEN_27B, "8xh100", SGLANG_REF, speculative="mtp", text_only=True)
    plan = drafted.plans[0]
    assert plan.speculation.value == "mtp"
    assert plan.num_speculative_tokens.value == 3
    assert plan.max_num_seqs.value <= 48
    assert {
        "--speculative-algorithm=NEXTN",
        "--speculative-num-steps=3",
        "--speculative-eagle-topk=1",
        "--speculative-num-draft-tokens=4",
    } <= {*plan.argv}


def test_drafts_take_memory_of_the_plan() -> None:
    usual = make_decision(QWEN_27B, "8xh100", SGLANG_REF, text_only=True, tensor_parallel=2)
    drafted = make_decision(
        QWEN_27B, "8xh100", SGLANG_REF, text_only=True, tensor_parallel=2, speculative="mtp"
    )
    added = drafted.plans[0].memory.weights_bytes - usual.plans[0].memory.weights_bytes
    # The layer has 440 million weights of 16 bits, of which each rank has half.
    assert added == pytest.approx(COPIES + 440e6, rel=0.1)
    assert drafted.plans[0].memory.kv_tokens < usual.plans[0].memory.kv_tokens


def test_a_version_before_the_pools_of_0_5_17_drafts_nothing() -> None:
    decision = make_decision(
        QWEN_27B, "8xh100", "sglang==0.5.16", speculative="mtp", text_only=True
    )
    assert all(plan.speculation.value == "none" for plan in decision.plans)
