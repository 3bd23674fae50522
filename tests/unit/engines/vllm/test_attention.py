"""Attention backends: the rules of each vLLM version agree with that version's own selection code,
and read well."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.domain import AttentionGroup, LayerAttention, Recurrent
from gateway.engines.common.rules.subject import AttentionQuery
from gateway.engines.vllm.attention import BackendChoice, choose_backend, layer_attention
from gateway.engines.vllm.attention_rules import AttentionRules
from gateway.models.rank import Rank
from tests.support.engine_rules import read_rules
from tests.support.examples import examples, quicker
from tests.support.versions import NEWEST_VLLM, VLLM, vllm_before, vllm_since

RULES = {version: read_rules(AttentionRules, "attention", version) for version in VLLM}


def group(kind: Any, head_dim: int, **more: Any) -> AttentionGroup:
    return AttentionGroup.model_validate(
        {"kind": kind, "layers": 1, "heads": 32, "kv_heads": 8, "head_dim": head_dim, **more}
    )


def rows(
    version: str, capability: str, *groups: AttentionGroup, kv: str = "auto", **fields: Any
) -> tuple[LayerAttention, ...]:
    return layer_attention(
        groups, RULES[version], Rank(kv_dtype=kv, capability=capability), **fields
    )


def choose(
    version: str, capability: str, kind: Any = "full", head_dim: int = 128, **fields: Any
) -> BackendChoice:
    query = {
        name: fields.pop(name) for name in list(fields) if name not in ("packages", "forced_name")
    }
    return choose_backend(
        RULES[version], AttentionQuery(kind=kind, head_dim=head_dim, **query), capability, **fields
    )


def reasons(choice: BackendChoice | LayerAttention) -> dict[str, str]:
    return {refusal.kernel: refusal.reason for refusal in choice.refusals}


# --- the drafter of the third report: non-causal, heads of 256 or 512, on 8.6 ---


@pytest.mark.parametrize("version", vllm_since("0.26"))
def test_a_non_causal_drafter_has_backends_on_8_6_for_both_head_sizes(version: str) -> None:
    small = choose(version, "8.6", head_dim=256, causal=False)
    assert (small.status, small.backend, small.version) == ("ok", "FLASH_ATTN", 2)
    large = choose(version, "8.6", head_dim=512, causal=False)
    assert (large.status, large.backend) == ("ok", "FLASHINFER")
    assert list(reasons(large)) == ["FLASH_ATTN"]
    assert "head size 512 is above 256" in reasons(large)["FLASH_ATTN"]
    for backend in ("TRITON_ATTN", "FLEX_ATTENTION"):
        assert (
            choose(version, "8.6", head_dim=512, causal=False, forced_name=backend).status == "ok"
        )


@pytest.mark.parametrize("version", vllm_before("0.26"))
def test_older_versions_do_not_look_at_causality(version: str) -> None:
    for head_dim in (256, 512):
        ahead = choose(version, "8.6", head_dim=head_dim, causal=False)
        assert ahead == choose(version, "8.6", head_dim=head_dim)
        assert ahead.status == "ok"
    assert "non_causal" not in RULES[version].asks


def test_one_layer_that_sees_ahead_makes_the_whole_drafter_non_causal() -> None:
    layers = (group("sliding", 128, window=512), group("full", 128, causal=False))
    assert [row.backend for row in rows(NEWEST_VLLM, "10.0", *layers, is_drafter=True)] == [
        "FLASH_ATTN",
        "FLASH_ATTN",
    ]
    causal = (group("sliding", 128, window=512), group("full", 128))
    assert [row.backend for row in rows(NEWEST_VLLM, "10.0", *causal, is_drafter=True)] == [
        "FLASHINFER",
        "FLASHINFER",
    ]


def test_a_forced_backend_that_refuses_a_drafter_leaves_none() -> None:
    (row,) = rows(
        NEWEST_VLLM,
        "8.6",
        group("full", 512, causal=False),
        is_drafter=True,
        forced_name="FLASH_ATTN",
    )
    assert (row.status, row.backend) == ("none", None)
    assert "head size 512 is above 256" in reasons(row)["FLASH_ATTN"]


# --- models ---


def test_every_kind_of_layer_is_judged_with_its_own_head_size() -> None:
    kinds = (group("sliding", 256, window=1024), group("full", 512))
    assert [row.backend for row in rows("0.19.1", "8.6", *kinds)] == ["FLASH_ATTN", "TRITON_ATTN"]


def test_gemma_4_gets_one_backend_for_both_of_its_head_sizes() -> None:
    kinds = (group("sliding", 256, window=1024), group("full", 512))
    for version in vllm_since("0.19"):
        ampere = rows(version, "8.6", *kinds, architecture="Gemma4ForConditionalGeneration")
        assert [row.backend for row in ampere] == ["TRITON_ATTN", "TRITON_ATTN"]
    hopper = rows("0.26.0", "9.0", *kinds, architecture="Gemma4ForConditionalGeneration")
    assert [(row.backend, row.version) for row in hopper] == [("FLASH_ATTN", 4), ("FLASH_ATTN", 4)]
    attention_rows = rows(
        "0.26.0",
        "8.6",
        *kinds,
        architecture="Gemma4ForConditionalGeneration",
        forced_name="flash_attn",
    )
    assert [row.status for row in attention_rows] == ["ok", "none"]


def test_gpt_oss_needs_a_backend_with_sinks() -> None:
    layers = (group("sliding", 64, window=128, sinks=True), group("full", 64, sinks=True))
    assert {row.backend for row in rows("0.18.0", "12.0", *layers)} == {"TRITON_ATTN"}
    assert {row.backend for row in rows(NEWEST_VLLM, "12.0", *layers)} == {"FLASHINFER"}
    assert {(row.backend, row.version) for row in rows(NEWEST_VLLM, "9.0", *layers)} == {
        ("FLASH_ATTN", 3)
    }


DEEPSEEK = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "index_topk": 2048}


@pytest.mark.parametrize("version", VLLM)
def test_sparse_mla_has_no_backend_on_ampere(version: str) -> None:
    layers = group("mla", 576, value_dim=512, heads=128, kv_heads=1, index_dim=128)
    (row,) = rows(version, "8.6", layers, config=DEEPSEEK)
    assert row.status == "none"
    assert "is not for sparse attention" in reasons(row)["TRITON_MLA"]
    assert (
        "runs on compute capability 9.* or 10.*, this GPU has 8.6"
        in reasons(row)["FLASHMLA_SPARSE"]
    )


def test_mla_on_blackwell_is_unknown_without_the_sizes_that_decide_it() -> None:
    layers = group("mla", 576, value_dim=512, heads=128, kv_heads=1)
    (bare,) = rows(NEWEST_VLLM, "10.0", layers)
    assert (bare.status, bare.refusals[-1].reason) == ("unknown", "qk_nope_head_dim is not known")
    (attention_row,) = rows(NEWEST_VLLM, "10.0", layers, config={"text_config": DEEPSEEK})
    assert (attention_row.status, attention_row.backend) == ("ok", "FLASHINFER_MLA")
    (row,) = rows(NEWEST_VLLM, "8.6", layers)  # nothing there asks for them
    assert row.backend == "TRITON_MLA"


def test_images_whose_tokens_see_one_another_leave_no_flash_attention_to_gemma_3() -> None:
    layers = group("full", 128)
    (text,) = rows("0.26.0", "8.6", layers, config={"model_type": "gemma3_text"})
    (images,) = rows("0.26.0", "8.6", layers, config={"model_type": "gemma3"})
    assert (text.backend, images.backend) == ("FLASH_ATTN", "TRITON_ATTN")
    assert reasons(images)["FLASHINFER"] == "does not take image tokens that see one another"


def test_gemma_4_with_images_uses_triton_where_tokens_see_both_ways() -> None:
    kinds = (group("sliding", 256, window=1024), group("full", 512))
    config = {"model_type": "gemma4", "text_config": {"use_bidirectional_attention": "vision"}}
    fields: dict[str, Any] = {"architecture": "Gemma4ForConditionalGeneration", "config": config}
    assert {row.backend for row in rows("0.26.0", "10.0", *kinds, **fields)} == {"TRITON_ATTN"}
    assert {row.backend for row in rows(NEWEST_VLLM, "10.0", *kinds, **fields)} == {
        "TRITON_FLASHINFER"
    }
    assert {row.backend for row in rows(NEWEST_VLLM, "9.0", *kinds, **fields)} == {
        "TRITON_FLASH_ATTN"
    }
    fields["config"] = {
        "model_type": "gemma4",
        "text_config": {"use_bidirectional_attention": None},
    }
    assert {row.backend for row in rows(NEWEST_VLLM, "10.0", *kinds, **fields)} == {"FLASHINFER"}


def test_layers_that_see_both_ways_are_encoder_layers() -> None:
    (row,) = rows(NEWEST_VLLM, "8.6", group("full", 512, causal=False))
    assert row.backend == "TRITON_ATTN"
    assert reasons(row)["FLASHINFER"] == "does not do encoder-only attention"


def test_vision_and_recurrent_layers_have_choices_of_their_own() -> None:
    state = Recurrent(
        kind="gdn", heads=32, rows=128, columns=128, groups=16, conv_channels=8192, conv_kernel=4
    )
    layers = (group("vision", 72, causal=False), group("recurrent", 0, recurrent=state))
    attention_rows = rows(NEWEST_VLLM, "8.6", *layers, forced_name="TRITON_ATTN")
    assert [(row.backend, row.version) for row in attention_rows] == [
        ("FLASH_ATTN", 2),
        ("GDN_ATTN", None),
    ]
    turing = rows(NEWEST_VLLM, "7.5", layers[0])
    assert turing[0].backend == "TORCH_SDPA"


# --- overrides and unknowns ---


def test_a_forced_backend_is_the_only_candidate() -> None:
    assert choose(NEWEST_VLLM, "8.6", forced_name="FLEX_ATTENTION").backend == "FLEX_ATTENTION"
    assert choose(NEWEST_VLLM, "8.6", forced_name="auto").backend == "FLASH_ATTN"
    choice = choose(
        NEWEST_VLLM, "8.6", forced_name="FLEX_ATTENTION", has_sinks=True, kv_dtype="fp8"
    )
    assert choice.status == "none"
    text = (
        "takes KV cache dtype auto or float16 or bfloat16, not fp8; does not take attention sinks"
    )
    assert reasons(choice) == {"FLEX_ATTENTION": text}


def test_attention_outside_the_rules_is_unknown() -> None:
    assert choose(NEWEST_VLLM, "8.6", forced_name="HPC_ATTN").status == "unknown"
    assert choose(NEWEST_VLLM, "8.6", kv_dtype="turboquant_k8v4").status == "unknown"
    assert choose(NEWEST_VLLM, "", head_dim=64).status == "unknown"
    assert choose(NEWEST_VLLM, "8.6", kind="recurrent").status == "unknown"
    (row,) = rows(
        NEWEST_VLLM, "10.0", group("mla", 512, value_dim=448), architecture="DeepseekV41ForCausalLM"
    )
    assert (row.status, row.refusals[0].reason) == (
        "unknown",
        "DeepseekV41ForCausalLM brings attention backends of its own",
    )


@pytest.mark.parametrize("version", vllm_since("0.26"))
@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ("8.0", None),
        ("9.0", "FLASHMLA_SPARSE_DSV4"),
        ("10.0", "FLASHMLA_SPARSE_DSV4"),
        ("12.1", "FLASHINFER_MLA_SPARSE_DSV4"),
    ],
)
def test_a_class_that_names_its_backends_is_refused_on_gpus_that_none_takes(
    version: str, capability: str, expected: str | None
) -> None:
    layers = group("full", 512)
    (row,) = rows(version, capability, layers, architecture="DeepseekV4ForCausalLM")
    assert (row.status, row.backend) == ("ok" if expected else "none", expected)
    if expected is None:
        assert reasons(row) == {
            "FLASHINFER_MLA_SPARSE_DSV4": "runs on compute capability 12.*, this GPU has 8.0",
            "FLASHMLA_SPARSE_DSV4": "runs on compute capability 9.* or 10.*, this GPU has 8.0",
        }
    options = {"architecture": "DeepseekV4ForCausalLM", "forced_name": "FLASHMLA_SPARSE"}
    assert rows(version, capability, layers, **options)[0].status == "unknown"


def test_a_package_that_is_missing_changes_the_answer() -> None:
    assert choose(NEWEST_VLLM, "10.0").backend == "FLASHINFER"
    bare = choose(NEWEST_VLLM, "10.0", packages=frozenset())
    assert (bare.backend, bare.version) == ("FLASH_ATTN", 4)
    assert reasons(bare) == {"FLASHINFER": "the package flashinfer is not installed"}


# --- the data and the evaluator hold together ---


@pytest.mark.parametrize("version", VLLM)
def test_every_rule_has_a_source_and_every_backend_is_in_a_list(version: str) -> None:
    rules = RULES[version]
    assert {name for order in rules.orders for name in order.backends} == set(rules.backends)
    sources = [value for name, value in rules if name.endswith("_source") and value]
    for source in [
        *sources,
        *(backend.source for backend in rules.backends.values()),
        *(model.source for model in rules.models),
    ]:
        path, _, line = source.rpartition(":")
        assert path.endswith(".py")
        assert line.isdigit()


def test_a_list_with_a_backend_that_is_not_described_is_refused() -> None:
    data = RULES["0.18.0"].model_dump()
    del data["backends"]["FLASHMLA"]
    with pytest.raises(ValueError, match="FLASHMLA is listed, but `backends` does not describe it"):
        AttentionRules.model_validate(data)


sizes = st.none() | st.integers(-4, 1 << 40)
attention_queries = st.builds(
    AttentionQuery,
    kind=st.sampled_from(["full", "sliding", "mla", "recurrent", "encoder", "vision"]),
    head_dim=st.integers(-4, 1 << 40) | st.sampled_from([64, 128, 256, 512, 576]),
    heads=st.integers(0, 1 << 20),
    dtype=st.sampled_from(["bfloat16", "float16", "float32", "", "int3"]),
    kv_dtype=st.sampled_from([*RULES[NEWEST_VLLM].kv_dtypes, "nvfp4", ""]),
    block_size=sizes,
    has_sinks=st.booleans(),
    causal=st.booleans(),
    sparse=st.booleans(),
    multimodal_prefix=st.booleans(),
    softcap=st.booleans(),
    role=st.sampled_from(["decoder", "encoder", "encoder_only", "encoder_decoder"]),
    nope_dim=sizes | st.just(128),
    rope_dim=sizes | st.just(64),
    value_dim=sizes,
    latent_dim=sizes,
    index_topk=sizes,
    recurrent=st.sampled_from(["", "gdn", "mamba2"]),
)


@settings(max_examples=examples(150))
@given(
    version=st.sampled_from(VLLM),
    query=attention_queries,
    capability=st.sampled_from(["7.0", "7.5", "8.6", "9.0", "10.0", "11.0", "12.1", "13.0"])
    | st.text(max_size=5),
    forced=st.none() | st.sampled_from(["auto", "FLASH_ATTN", "TRITON_MLA", "none such"]),
)
def test_any_layer_gets_an_answer_with_a_reason_and_never_an_error(
    version: str, query: AttentionQuery, capability: str, forced: str | None
) -> None:
    choice = choose_backend(RULES[version], query, capability, None, forced)
    assert (choice.backend is not None) == (choice.status == "ok")
    assert choice.status == "ok" or choice.refusals
    assert all(refusal.reason for refusal in choice.refusals)
    assert choice.backend not in {refusal.kernel for refusal in choice.refusals}
    if choice.status == "ok":
        second_choice = choose_backend(RULES[version], query, capability, None, choice.backend)
        assert second_choice.backend == choice.backend  # a good one may be forced


@settings(max_examples=quicker(80), deadline=None)
@given(
    config=st.dictionaries(
        st.sampled_from(
            [*DEEPSEEK, "attn_logit_softcapping", "model_type", "text_config", "is_mm_prefix_lm"]
        ),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=4)
        | st.lists(st.integers(), max_size=2),
    ),
    tp=st.integers(-1, 300),
)
def test_no_config_makes_it_raise(config: dict[str, Any], tp: int) -> None:
    layers = [group("mla", 576, value_dim=512, index_dim=128), group("full", 128)]
    choices = layer_attention(
        layers, RULES[NEWEST_VLLM], Rank(tp=tp, capability="10.0"), config=config
    )
    assert len(choices) == 2


@pytest.mark.parametrize(("dtype", "backend"), [("bfloat16", "FLASH_ATTN"), ("float16", None)])
def test_flash_attention_refuses_an_fp8_cache_of_a_float16_model(
    dtype: str, backend: str | None
) -> None:
    """As an H200 said when it was tried."""
    (row,) = layer_attention(
        (group("full", 128),), RULES["0.26.0"], Rank(kv_dtype="fp8", capability="9.0", dtype=dtype)
    )
    assert row.backend == backend


def test_a_tower_has_no_cache_that_its_backend_could_refuse() -> None:
    """Qwen3.6-27B in float16 with an FP8 cache starts on two RTX 3090
    (github.com/noonghunna/club-3090/issues/642)."""
    tower, text = layer_attention(
        (group("vision", 72), group("full", 256)),
        RULES["0.26.0"],
        Rank(kv_dtype="fp8_e4m3", capability="8.6", dtype="float16"),
    )
    assert (tower.backend, tower.status) == ("FLASH_ATTN", "ok")
    assert text.backend == "FLASHINFER"


@pytest.mark.parametrize("version", VLLM)
@pytest.mark.parametrize("capability", ["8.0", "9.0", "10.0", "12.0"])
def test_flash_attention_of_layers_with_alibi_is_version_2(version: str, capability: str) -> None:
    """get_flash_attn_version takes neither version 3 nor 4 with ALiBi."""
    choice = choose(version, capability, alibi=True, forced_name="FLASH_ATTN")
    assert (choice.status, choice.version) == ("ok", 2)


@pytest.mark.parametrize("version", VLLM)
def test_flex_attention_is_refused_at_the_start_of_a_model_with_alibi(version: str) -> None:
    (row,) = rows(version, "8.0", group("full", 128, alibi=True), forced_name="FLEX_ATTENTION")
    assert row.status == "none"
    assert row.refusals[-1].is_at_start
    (plain,) = rows(version, "8.0", group("full", 128), forced_name="FLEX_ATTENTION")
    assert plain.status == "ok"


@pytest.mark.parametrize("version", VLLM)
def test_keys_of_an_encoder_are_asked_for_by_their_kind(version: str) -> None:
    """FlexAttention and FlashInfer take no attention of a decoder to its encoder."""
    (row,) = rows(version, "9.0", group("cross", 64))
    assert (row.kind, row.backend) == ("cross", "FLASH_ATTN")
    (attention_row,) = rows(version, "9.0", group("cross", 64), forced_name="FLEX_ATTENTION")
    assert "encoder-decoder" in attention_row.refusals[0].reason


def test_recurrent_layers_of_some_architectures_bring_their_own_backend() -> None:
    state = Recurrent(
        kind="kda", heads=96, rows=128, columns=128, groups=96, conv_channels=36864, conv_kernel=4
    )
    layer = group("recurrent", 128, recurrent=state)
    (usual,) = rows(NEWEST_VLLM, "9.0", layer, architecture="KimiLinearForCausalLM")
    (attention_row,) = rows(
        NEWEST_VLLM, "9.0", layer, architecture="KimiK3ForConditionalGeneration"
    )
    assert (usual.backend, attention_row.backend) == ("GDN_ATTN", "KIMI_K3_KDA")


# --- shared memory of a block of threads ---


@pytest.mark.parametrize("version", VLLM)
@pytest.mark.parametrize(
    ("head_dim", "dtype", "kib"),
    [
        (128, "float32", 0),
        (192, "float32", 80),  # in tiles of 256
        (256, "float16", 0),
        (256, "float32", 80),  # vllm-project/vllm issue 36802: 81,920 bytes on a T4
        (512, "float16", 80),  # issue 57712: on two cards of 7.5
    ],
)
def test_heads_beyond_the_shared_memory_of_turing_are_refused(
    version: str, head_dim: int, dtype: Any, kib: int
) -> None:
    """Also as they are forced; Ampere has room for all of them."""
    heads = group("full", head_dim)
    turing = Rank(dtype=dtype, kv_dtype="auto", capability="7.5")
    for backend in ("TRITON_ATTN", "FLEX_ATTENTION"):
        (row,) = layer_attention((heads,), RULES[version], turing, forced_name=backend)
        assert (row.status, row.backend) == (("none", None) if kib else ("ok", backend))
        if kib and backend == "TRITON_ATTN":
            assert f"take {kib} KiB of shared memory" in reasons(row)[backend]
        (row,) = layer_attention(
            (heads,), RULES[version], turing._replace(capability="8.0"), forced_name=backend
        )
        assert row.backend == backend


@pytest.mark.parametrize(
    ("version", "capability", "head_dim", "backend"),
    [
        ("0.26.0", "10.0", 128, "FLASHINFER"),
        ("0.26.0", "12.0", 128, None),  # vllm issue 49011
        ("0.33.0", "12.0", 128, "FLASHINFER"),
        ("0.33.0", "8.6", 256, "FLASHINFER"),
        ("0.33.0", "8.6", 64, None),
        ("0.33.0", "10.0", 64, "FLASHINFER"),
    ],
)
def test_a_cache_in_nvfp4_has_the_backend_of_its_version(
    version: str, capability: str, head_dim: int, backend: str | None
) -> None:
    """FlashInferBackend.supports_kv_cache_dtype and supports_combination of both versions."""
    choice = choose(version, capability, head_dim=head_dim, kv_dtype="nvfp4")
    assert (choice.status, choice.backend) == ("ok" if backend else "none", backend)


@pytest.mark.parametrize(
    ("capability", "backend"),
    [("8.9", None), ("9.0", "FLASHINFER_MLA_SPARSE_SM90"), ("12.0", "FLASHINFER_MLA_SPARSE_SM120")],
)
def test_sparse_heads_without_a_rotary_part_take_a_backend_of_the_lists(
    capability: str, backend: str | None
) -> None:
    """GLM-5.3-Flash on eight RTX 4090 is refused: vllm issue 54059."""
    layer = group("mla", 512, heads=8, kv_heads=1, value_dim=512, index_dim=128)
    text = {"qk_rope_head_dim": 0, "qk_nope_head_dim": 256, "kv_lora_rank": 512}
    (row,) = rows(
        NEWEST_VLLM,
        capability,
        layer,
        architecture="Glm5NextForConditionalGeneration",
        config={"text_config": {**text, "v_head_dim": 256, "index_topk": 2048}},
    )
    assert (row.status, row.backend) == ("ok" if backend else "none", backend)
