"""The attention backends that SGLang takes: the rules against the engine's own answers, and the
plans that follow."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from gateway.domain import AttentionGroup, Decision, LayerAttention, ModelSpec, Wish
from gateway.engines.sglang.attention import server_attention
from gateway.engines.sglang.attention_rules import BackendRules
from gateway.models.rank import Rank
from gateway.profiles.profiles import Profiles
from tests.support.engine_rules import rule_document
from tests.support.paths import ROOT
from tests.support.planning import decide
from tests.support.published import published_model
from tests.support.versions import NEWEST_SGLANG, SGLANG

PROFILES = Profiles()
# Versions without rules of their own.
BETWEEN = ROOT / "profiles/engine_diffs/sglang"


@cache
def rules(version: str) -> BackendRules:
    return BackendRules.model_validate(rule_document("sglang", version, "attention_backends"))


@cache
def model(name: str) -> ModelSpec:
    return published_model(name)


def rows(
    version: str, name: str, capability: str, args: dict[str, Any] | None = None
) -> dict[str, LayerAttention]:
    spec = model(name)
    attention_rows = server_attention(
        spec.attention,
        rules(version),
        Rank(capability=capability),
        spec.architecture,
        spec.config,
        24 << 30,
        args or {},
    )
    return {row.kind: row for row in attention_rows}


# --- the engine's own answers ---


@pytest.mark.parametrize("version", SGLANG)
def test_rules_name_flags_and_values_of_their_version(version: str) -> None:
    engine, known_rules = PROFILES.engine(f"sglang=={version}"), rules(version)
    assert set(known_rules.unmodelled_flags) <= set(engine.flags)
    assert {*known_rules.own_backends, *known_rules.mla} <= set(engine.architectures)
    assert {*known_rules.backends, *known_rules.repairs} <= set(
        engine.flags["attention-backend"].choices or ()
    )
    choices = engine.flags["kv-cache-dtype"].choices or ()
    assert set(known_rules.kv_dtypes) <= set(choices)


# --- outside of the rules ---


def test_attention_outside_the_rules_is_unknown() -> None:
    group = AttentionGroup(kind="full", layers=4, heads=8, kv_heads=8, head_dim=128)

    def server_rows(
        architecture: str = "LlamaForCausalLM",
        kv_dtype: str = "auto",
        args: Any = None,
        config: Any = None,
        **of: Any,
    ) -> Any:
        groups = [group.evolve(**of)]
        return server_attention(
            groups,
            rules(NEWEST_SGLANG),
            Rank(kv_dtype=kv_dtype, capability="9.0"),
            architecture,
            config or {},
            1 << 36,
            args or {},
        )[0]

    assert server_rows().status == "ok"
    attention_rows = [
        server_rows("MiMoV2ForCausalLM"),
        server_rows(kv_dtype="fp4_e2m1"),
        server_rows(args={"speculative-algorithm": "EAGLE"}),
        server_rows(args={"attention-backend": "aiter"}),
        server_rows(args={"attention-backend": "flashmla"}),
        server_rows(config={"learnable_sink": True}),
        server_rows(kind="mla", value_dim=512),
        server_rows(value_dim=64),
    ]
    assert [row.status for row in attention_rows] == ["unknown"] * len(attention_rows)
    assert all(row.backend is None and row.refusals[0].reason for row in attention_rows)


@pytest.mark.parametrize(("is_text_only", "backend"), [(False, "triton"), (True, None)])
def test_a_field_of_config_json_that_is_off_changes_no_backend(
    is_text_only: bool, backend: str | None
) -> None:
    """Qwen publishes `"language_model_only": false`."""
    spec = model("qwen3.5-9b")
    config = {**spec.config, "language_model_only": is_text_only}
    attention_rows = server_attention(
        spec.attention,
        rules(NEWEST_SGLANG),
        Rank(capability="8.6"),
        spec.architecture,
        config,
        24 << 30,
        {},
    )
    assert {row.backend for row in attention_rows if row.kind == "recurrent"} == {backend}


@pytest.mark.parametrize("version", SGLANG)
def test_a_cache_without_prefixes_decides_for_states_on_data_center_blackwell(version: str) -> None:
    args = {"disable-radix-cache": True}
    for name, capability in (("qwen3-8b", "9.0"), ("qwen3-8b", "10.0"), ("qwen3.5-9b", "12.1")):
        usual, without = (
            rows(version, name, capability, arguments)["full"] for arguments in ({}, args)
        )
        assert usual.backend == without.backend is not None
    assert rows(version, "qwen3.5-9b", "10.0", args)["full"].status == "unknown"


# --- plans ---


def plan(hardware: str, version: str, spec: ModelSpec, **wish: Any) -> Decision:
    engine = PROFILES.engine(f"sglang=={version}")
    return decide(
        spec,
        PROFILES.hardware(hardware),
        [engine],
        Wish(name="m", **wish),
        rules=PROFILES.rules([engine]),
    )


@pytest.mark.parametrize("version", SGLANG)
@pytest.mark.parametrize(
    ("hardware", "name", "backend", "block"),
    [
        ("3090", "qwen3-8b", "flashinfer", 1),
        ("8xh100", "gpt-oss-20b", "fa3", 1),
        ("8xb200", "gpt-oss-20b", "trtllm_mha", 64),
        ("rtx-pro-6000", "gpt-oss-20b", "triton", 1),
        ("8xh100", "deepseek-v2-lite", "fa3", 1),
        ("l40s", "deepseek-v2-lite", "triton", 1),
    ],
)
def test_a_plan_says_which_backend_computes_attention(
    version: str, hardware: str, name: str, backend: str, block: int
) -> None:
    best = plan(hardware, version, model(name), tensor_parallel=1).plans[0]
    assert {(row.backend, row.block, row.status) for row in best.attention} == {
        (backend, block, "ok")
    }
    assert not [argument for argument in best.argv if "attention-backend" in argument]


@pytest.mark.parametrize("version", sorted(file.stem for file in BETWEEN.glob("*.yaml")))
def test_a_version_names_backends_of_the_rules_that_decide(version: str) -> None:
    """Its own rules have no backend for sparse attention, those of a later version do."""
    decision = plan("8xb200", version, model("deepseek-v3.2"))
    kinds = {row.status for best in decision.plans for row in best.attention}
    assert kinds <= {"ok", "unknown"}
    if version == "0.5.16":
        assert {row.backend for row in decision.plans[0].attention} == {"dsa"}


def test_a_backend_that_differs_for_prefill_and_decoding_is_named_as_both() -> None:
    options = {"decode-attention-backend": "flashinfer"}
    row = rows(NEWEST_SGLANG, "qwen3-8b", "9.0", options)["full"]
    assert (row.backend, row.version, row.block) == ("fa3/flashinfer", None, 1)


def test_another_backend_is_forced_if_the_engines_own_choice_would_fail() -> None:
    """OLMo 2 gets FlashAttention 3 on every GPU from Ampere on, which does not run on Blackwell."""
    best = plan("rtx-pro-6000", "0.5.10.post1", model("olmo-2-13b"), tensor_parallel=1).plans[0]
    assert "--attention-backend=triton" in best.argv
    assert best.verdict == "degraded"
    assert "runs on compute capability" in best.kernel_overrides.reason
    decision = plan(
        "rtx-pro-6000",
        "0.5.10.post1",
        model("olmo-2-13b"),
        tensor_parallel=1,
        args={"attention-backend": "fa3"},
    )
    assert not decision.plans
    assert [rejection.verdict for rejection in decision.rejected] == ["no_backend"]


def test_an_encoder_is_kept_from_a_backend_that_would_hide_later_tokens() -> None:
    """0.5.10.post1 would take it and answer with wrong embeddings; 0.5.23 tells it which models are
    encoders."""
    best = plan("8xb200", "0.5.10.post1", model("bge-m3"), tensor_parallel=1).plans[0]
    assert "--attention-backend=flashinfer" in best.argv
    assert "hides later tokens from each token" in best.kernel_overrides.reason
    assert (
        plan("8xb200", NEWEST_SGLANG, model("bge-m3"), tensor_parallel=1)
        .plans[0]
        .attention[0]
        .backend
        == "trtllm_mha"
    )


def test_a_forced_backend_is_checked() -> None:
    decision = plan(
        "3090",
        NEWEST_SGLANG,
        model("qwen3-8b"),
        tensor_parallel=1,
        args={"attention-backend": "trtllm_mha"},
    )
    assert [rejection.verdict for rejection in decision.rejected] == ["no_backend"]
    assert "trtllm_mha: runs on compute capability 9.* or 10.*" in decision.rejected[0].reasons[0]
    decision_for_triton = plan(
        "3090",
        NEWEST_SGLANG,
        model("qwen3-8b"),
        tensor_parallel=1,
        args={"attention-backend": "triton", "page-size": 16},
    )
    assert (
        decision_for_triton.plans[0].attention[0].backend,
        decision_for_triton.plans[0].attention[0].block,
    ) == (
        "triton",
        16,
    )


@pytest.mark.parametrize("version", SGLANG)
def test_triton_keeps_no_e4m3_on_gpus_without_its_compiler_support(version: str) -> None:
    spec = model("deepseek-v2-lite")

    def row(kv: str, capability: str) -> LayerAttention:
        rank = Rank(kv_dtype=kv, capability=capability)
        (attention_row,) = server_attention(
            spec.attention, rules(version), rank, spec.architecture, spec.config, 24 << 30, {}
        )
        return attention_row

    attention_row = row("fp8_e4m3", "8.6")
    assert (
        attention_row.status,
        attention_row.refusals[0].kernel,
        attention_row.refusals[0].is_at_start,
    ) == (
        "none",
        "triton",
        True,
    )
    assert [
        row("fp8_e4m3", "8.9").backend,
        row("fp8_e5m2", "8.6").backend,
        row("auto", "8.6").backend,
    ] == ["triton"] * 3
