"""Speculative decoding: the rules agree with each vLLM version's own code, and a drafter that
cannot run costs no model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.domain import (
    AttentionGroup,
    LayerAttention,
    Refusal,
)
from gateway.engines.common.layers.build import build
from gateway.engines.common.speculative.speculative import drafter_bytes
from gateway.engines.common.speculative.speculative_rules import Speculation
from gateway.engines.vllm.attention import layer_attention
from gateway.engines.vllm.attention_rules import AttentionRules
from gateway.errors import BadModel
from gateway.models.rank import Rank
from gateway.models.read_drafter import read_drafter
from gateway.models.tensor import Tensor
from tests.conformance.speculative_questions import DRAFTERS
from tests.support.drafters import (
    RULES,
    attends,
    drafter,
    engine,
    row,
    speculation_of,
    target,
    wish,
)
from tests.support.engine_rules import rule_document
from tests.support.examples import examples
from tests.support.versions import NEWEST_VLLM, VLLM, since, vllm_before, vllm_since


def no_backend(groups: tuple[AttentionGroup, ...]) -> tuple[LayerAttention, ...]:
    reasons = {
        "FLASH_ATTN": "head_size not supported",
        "FLASHINFER": "non-causal attention not supported",
    }
    refusals = tuple(Refusal(kernel=kernel, reason=reason) for kernel, reason in reasons.items())
    return tuple(row(group, None, "none").evolve(refusals=refusals) for group in groups)


# --- seed case 003: a DFlash drafter for Gemma 4 on two RTX 3090 ---


def gemma(version: str, backends: Any = attends, **fields: Any) -> Speculation:
    spec = target("gemma-4-31b", drafting=False)
    request = wish(drafter="org/drafter", **fields)
    return speculation_of(
        spec,
        drafter("dflash gemma-4-31b"),
        request,
        engine(version),
        RULES[version],
        backends,
        Rank(tp=2),
    )


@pytest.mark.parametrize("version", vllm_since("0.26"))
def test_a_dflash_drafter_gets_its_number_of_tokens_from_its_config(version: str) -> None:
    speculation = gemma(version)
    assert speculation.config == {
        "method": "dflash",
        "model": "org/drafter",
        "num_speculative_tokens": 8,
    }
    assert speculation.tokens is not None
    assert (
        speculation.tokens.reason
        == "taken from speculators_config.proposal_methods[0].speculative_tokens = 8"
    )
    assert [
        (group.kind, group.head_dim, group.causal, group.layers) for group in speculation.groups
    ] == [("full", 256, False, 5)]
    assert speculation.slots == (0 if since(version, "0.33") else 7)
    assert speculation.warnings == ()


@pytest.mark.parametrize("version", vllm_before("0.26"))
def test_a_version_without_the_method_serves_the_target_alone(version: str) -> None:
    speculation = gemma(version)
    assert speculation.method.value == "none"
    assert speculation.config == {}
    assert speculation.weights_bytes == 0
    assert [refusal.kernel for refusal in speculation.refused] == ["dflash"]
    assert "has no such method" in speculation.warnings[0]


def test_a_drafter_without_a_backend_is_dropped_with_every_reason() -> None:
    speculation = gemma(NEWEST_VLLM, no_backend)
    assert speculation.method.value == "none"
    assert speculation.config == {}
    assert [refusal.kernel for refusal in speculation.refused] == ["FLASH_ATTN", "FLASHINFER"]
    assert "FLASHINFER: non-causal attention not supported" in speculation.warnings[0]
    assert speculation.warnings[0].startswith("The model is served without speculative decoding")


@pytest.mark.parametrize("version", vllm_since("0.26"))
@pytest.mark.parametrize("capability", ["8.6", "9.0", "12.0"])
def test_the_attention_rules_have_a_backend_for_drafters(version: str, capability: str) -> None:
    speculation = gemma(version, by_rules(version, capability, "auto"))
    assert speculation.config["num_speculative_tokens"] == 8
    assert [row.status for row in speculation.attention] == ["ok"]


def by_rules(version: str, capability: str, kv_dtype: str) -> Any:
    rules = AttentionRules.model_validate(rule_document("vllm", version, "attention"))
    return lambda groups: layer_attention(
        groups, rules, Rank(tp=2, kv_dtype=kv_dtype, capability=capability), is_drafter=True
    )


def test_the_user_decides_the_number_of_tokens() -> None:
    assert gemma(NEWEST_VLLM, num_speculative_tokens=4).config["num_speculative_tokens"] == 4


# --- policy ---


def test_nothing_is_drafted_unless_it_is_asked_for() -> None:
    for fields in ({}, {"speculative": "off"}):
        speculation = speculation_of(
            target("glm-4.5-air"),
            None,
            wish(**fields),
            engine(NEWEST_VLLM),
            RULES[NEWEST_VLLM],
            attends,
            Rank(),
        )
        assert speculation.method.value == "none"
        assert not speculation.warnings


@pytest.mark.parametrize(
    ("name", "drafting", "method", "reason"),
    [
        ("glm-4.5-air", True, "mtp", "the checkpoint has layers that draft"),
        ("glm-4.5-air", False, "none", "the weight files hold no layers that draft"),
        ("qwen3-8b", True, "none", "knows no drafting layers of Qwen3ForCausalLM"),
        ("nemotron-3-nano-30b-a3b", True, "none", "config.json names no layers that draft"),
    ],
)
def test_auto_drafts_with_the_checkpoints_own_layers_only(
    name: str, drafting: bool, method: str, reason: str
) -> None:
    spec = target(name, drafting=drafting)
    speculation = speculation_of(
        spec,
        None,
        wish(speculative="auto"),
        engine(NEWEST_VLLM),
        RULES[NEWEST_VLLM],
        attends,
        Rank(tp=1),
    )
    assert speculation.method.value == method
    assert reason in speculation.method.reason
    assert not speculation.warnings
    wished_speculation = speculation_of(
        spec,
        None,
        wish(speculative="mtp"),
        engine(NEWEST_VLLM),
        RULES[NEWEST_VLLM],
        attends,
        Rank(tp=1),
    )
    assert wished_speculation.method.value == method
    assert bool(wished_speculation.warnings) == (method == "none")


def test_an_engine_without_rules_serves_the_target_alone() -> None:
    speculation = speculation_of(
        target("qwen3-8b"),
        None,
        wish(speculative="ngram"),
        engine("9.9"),
        None,
        attends,
        Rank(tp=1),
    )
    assert speculation.method.value == "none"
    assert "not known here" in speculation.warnings[0]


def test_a_drafter_for_another_model_is_dropped() -> None:
    request = wish(drafter="org/drafter")
    speculation = speculation_of(
        target("llama-3.1-8b"),
        drafter("eagle3 llama"),
        request,
        engine(NEWEST_VLLM),
        RULES[NEWEST_VLLM],
        attends,
        Rank(),
    )
    assert (
        "reads a vocabulary of 151936 tokens, and the target has 128256" in speculation.warnings[0]
    )
    speculation = speculation_of(
        target("gpt-oss-20b"),
        drafter("eagle3 llama"),
        request,
        engine(NEWEST_VLLM),
        RULES[NEWEST_VLLM],
        attends,
        Rank(),
    )
    assert "made for a target of hidden size 4096, and this one has 2880" in speculation.warnings[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"drafter": "a/b", "speculative": "off"},
        {"drafter": "a/b", "speculative": "mtp"},
        {"num_speculative_tokens": 3},
        {"speculative": "off", "num_speculative_tokens": 3},
        {"speculative": "auto", "num_speculative_tokens": 0},
    ],
)
def test_a_wish_that_contradicts_itself_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="speculative"):
        wish(**fields)


# --- reading ---


@pytest.mark.parametrize(
    ("name", "method", "tokens", "causal"),
    [
        ("eagle3 speculators llama", "eagle3", 3, True),
        ("eagle3 bare llama", "eagle3", None, True),
        ("peagle speculators", "eagle3", 4, True),
        ("dflash speculators", "dflash", 8, False),
        ("dflash qwen3", "dflash", 15, False),
        ("dspark qwen3", "dspark", 7, False),
    ],
)
def test_a_drafter_is_described_by_its_config(
    name: str, method: str, tokens: int | None, causal: bool
) -> None:
    draft_model = drafter(name)
    assert (draft_model.method, draft_model.tokens, draft_model.attention[0].causal) == (
        method,
        tokens,
        causal,
    )


def test_headers_win_over_shapes_from_the_config() -> None:
    tensors = {
        "d2t": Tensor("I64", (10,)),
        "t2d": Tensor("BOOL", (99,)),
        "layers.0.self_attn.k_proj.weight": Tensor("BF16", (64, 8)),
    }
    drafter = read_drafter("org/drafter", None, DRAFTERS["eagle3 llama"], tensors)
    assert drafter_bytes(drafter, Rank(tp=2), build) == 80 + 512


def test_a_sliding_drafter_needs_a_window() -> None:
    config = DRAFTERS["dflash qwen3"] | {"layer_types": ["sliding_attention"] * 5}
    with pytest.raises(BadModel, match="sliding_window"):
        read_drafter("org/drafter", None, config)
    drafter = read_drafter("org/drafter", None, config | {"sliding_window": 2048})
    assert [(group.kind, group.window, group.causal) for group in drafter.attention] == [
        ("sliding", 2048, True)
    ]


FIELDS = [
    "architectures",
    "model_type",
    "speculators_model_type",
    "speculators_config",
    "transformer_layer_config",
    "draft_vocab_size",
    "block_size",
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "layer_types",
    "dflash_config",
    "target_layer_ids",
    "aux_hidden_state_layer_ids",
    "markov_rank",
    "kv_lora_rank",
    "eagle_config",
]


@settings(max_examples=examples(150))
@given(
    st.sampled_from(sorted(DRAFTERS)),
    st.sampled_from(FIELDS),
    st.one_of(
        st.none(), st.integers(-5, 2**70), st.booleans(), st.text(max_size=5),
        st.lists(st.integers(), max_size=3),
        st.dictionaries(st.sampled_from(["proposal_methods", "causal", "use_swa",
            "target_layer_ids"]), st.lists(st.none(), max_size=2)),
    ),
)  # fmt: skip
def test_no_config_raises_anything_but_bad_model(name: str, field: str, value: Any) -> None:
    config = json.loads(json.dumps(DRAFTERS[name]))
    where = (
        config["transformer_layer_config"]
        if field in config.get("transformer_layer_config", {})
        else config
    )
    where[field] = value
    try:
        drafter = read_drafter("org/drafter", None, config)
    except BadModel:
        return
    speculation_of(
        target("qwen3-8b"),
        drafter,
        wish(drafter="a/b"),
        engine(NEWEST_VLLM),
        RULES[NEWEST_VLLM],
        attends,
        Rank(tp=2),
    )


@pytest.mark.parametrize("version", VLLM)
@pytest.mark.parametrize(("pp", "method"), [(1, "mtp"), (2, "none")])
def test_layers_that_draft_run_in_stages_only_where_their_class_can(
    version: str, pp: int, method: str
) -> None:
    """vllm-project/vllm#36643."""
    spec = target("qwen3.5-9b")
    speculation = speculation_of(
        spec,
        None,
        wish(speculative="mtp"),
        engine(version).evolve(no_stages=("Qwen3_5MTP",)),
        RULES[version],
        attends,
        Rank(tp=1, pp=pp),
    )
    # Version 0.32.0 gives a drafter one stage.
    assert speculation.method.value == ("mtp" if since(version, "0.32.0") else method)
