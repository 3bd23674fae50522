"""Versions between those with rules choose as their own code does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from gateway.profiles.profiles import Profiles
from tests.conformance import (
    known_choices,
    sglang_attention_questions,
    sglang_linear_questions,
    sglang_moe_questions,
)
from tests.conformance.choice_cases import FILE, Case, read_answers
from tests.conformance.golden import golden
from tests.conformance.known_choices import agreement, choices_of, rule_answer

PROFILES = Profiles()
RULED = [ref for ref in PROFILES.engine_files if ref.startswith("sglang==")]
GUESSED = sorted(ref for ref in PROFILES.diff_files if ref.startswith("sglang=="))
ASKED = [f"sglang=={version}" for version in read_answers()]


@pytest.mark.parametrize("ref", GUESSED)
def test_a_profile_has_the_choices_that_the_kept_answers_show(ref: str) -> None:
    engine = PROFILES.engine(ref)
    near = str(engine.guessed_from)
    assert engine.choices == choices_of(
        PROFILES, ref, near, [rule for rule in RULED if rule != near]
    )


@pytest.mark.parametrize("ref", RULED)
def test_one_capability_of_each_kind_answers_for_the_others(ref: str) -> None:
    version = ref.partition("==")[2]
    for module in (sglang_attention_questions, sglang_linear_questions, sglang_moe_questions):
        answers = golden(module, version)
        for kind, sibling in (("8.6", "8.0"), ("10.0", "10.3"), ("12.0", "12.1")):
            assert answers[kind] == answers[sibling]


@pytest.mark.parametrize("ref", ASKED)
def test_ampere_is_asked_beside_ada_where_versions_are(ref: str) -> None:
    """FP8 begins with Ada, so that neither answers for the other."""
    gpus = known_choices.answers_near(ref, str(PROFILES.engine(ref).guessed_from))
    assert {"8.6", "8.9"} <= gpus.keys()


def test_choices_hold_on_no_kind_of_gpu_that_was_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of gpt-oss, and layers with 8-bit inputs, are as in 0.5.10.post1 on both kinds."""
    kinds = {kind: read_answers()["0.5.21"][kind] for kind in ("9.0", "12.0")}
    monkeypatch.setattr(known_choices, "answers_near", lambda *_: kinds)
    choices = choices_of(PROFILES, "sglang==0.5.21", "sglang==0.5.23", ["sglang==0.5.10.post1"])
    rows = [choice for choice in choices if choice.rules_file != "memory"]
    assert {choice.rules_file for choice in rows} == {"attention_backends", "linear", "moe"}
    assert all(choice.conditions.get("capabilities") for choice in rows)
    assert ("9.*", "12.*") in {choice.conditions["capabilities"] for choice in rows}


def test_memory_of_a_version_is_never_that_of_another_on_other_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sizes of memory are alike on all GPUs: an older version's on 8.0 are not news of a newer."""
    key = Case("memory", "llama-3.1-8b").key
    answers_by_version = {
        "0.5.19": {"8.0": {key: [2048, 24, 0.9, 0], "linear one": "gptq"}},
        "0.5.20": {"9.0": {key: [4096, 48, 0.8, 0], "linear one": "torch"}},
    }
    monkeypatch.setattr(known_choices, "read_answers", lambda: answers_by_version)
    answers = known_choices.answers_near("sglang==0.5.20", "sglang==0.5.23")
    assert answers["8.0"][key] == [4096, 48, 0.8, 0]
    assert answers["8.0"]["linear one"] == "gptq"
    assert [gpu for gpu in answers if key in answers[gpu]] == ["8.0"]


@pytest.mark.parametrize("ref", ASKED)
def test_the_forecast_of_a_version_equals_the_answers_of_its_code(ref: str) -> None:
    table = agreement(PROFILES, ref, read_answers()[ref.partition("==")[2]])
    counts: Counter[str] = sum(table.values(), Counter())
    assert counts["wrong"] <= counts.total() * 0.02, table
    assert counts["unknown"] <= counts.total() * 0.15, table


def forecast(version: str, capability: str, *case: str) -> Any:
    return rule_answer(PROFILES, f"sglang=={version}", Case(*case), capability)


def test_gemma_4_gets_trtllm_on_data_center_blackwell_since_0_5_14() -> None:
    """github.com/sgl-project/sglang pull request 25006, merged after 0.5.12."""
    case = "attention_backends", "gemma-4-26b-a4b"
    assert forecast("0.5.12", "10.0", *case) == ["triton", "triton", 1]
    assert forecast("0.5.14", "10.0", *case) == ["trtllm_mha", "trtllm_mha", 64]


def test_experts_of_minimax_m2_in_nvfp4_get_the_runner_of_their_version() -> None:
    case = "moe", "minimax-m2", "modelopt", "nvfp4"
    method = "ModelOptNvFp4FusedMoEMethod"
    assert forecast("0.5.12", "10.0", *case) == [method, "flashinfer_trtllm"]
    assert forecast("0.5.23", "10.0", *case) == [method, "flashinfer_trtllm_routed"]


def test_an_architecture_unknown_to_the_nearest_rules_is_unknown() -> None:
    case = "attention_backends", "kimi_k25"
    assert forecast("0.5.10.post1", "10.0", *case) == "unknown"
    assert forecast("0.5.12", "10.0", *case) == ["trtllm_mla", "trtllm_mla", 64]


def test_nvfp4_experts_have_runners_on_workstations_and_before_blackwell() -> None:
    """Rules of 0.5.10.post1 alone left them unknown: the forecast for 0.5.13."""
    case = "moe", "gemma-4-26b-a4b", "modelopt", "nvfp4"
    method = "ModelOptNvFp4FusedMoEMethod"
    assert forecast("0.5.13", "12.0", *case) == [method, "flashinfer_trtllm"]
    assert forecast("0.5.13", "9.0", *case) == [method, "marlin"]
    assert forecast("0.5.23", "12.0", *case) == [method, "flashinfer_trtllm"]


def test_integers_are_refused_where_the_family_has_another_runner() -> None:
    case = "moe", "qwen3-30b-a3b", "gptq", "wna16"
    assert forecast("0.5.13", "10.0", *case) == "refused"
    assert forecast("0.5.13", "9.0", *case)[1] == "marlin"


def test_dense_layers_in_nvfp4_use_marlin_before_blackwell() -> None:
    case = "linear", "", "modelopt", "nvfp4", "4,16,symmetric"
    assert forecast("0.5.13", "9.0", *case) == "apply_fp4_marlin_linear"


def test_settings_of_memory_follow_the_classes_of_the_version() -> None:
    """0.5.19 still has the classes of 0.5.10.post1."""
    assert forecast("0.5.19", "9.0", "memory", "llama-3.1-8b")[:2] == [2048, 24]
    assert forecast("0.5.23", "9.0", "memory", "llama-3.1-8b")[:2] == [4096, 48]


def test_states_of_a_hybrid_request_grow_in_newer_versions() -> None:
    case = "9.0", "memory", "qwen3-next-80b-a3b"
    assert forecast("0.5.10.post1", *case)[3] == 3
    assert forecast("0.5.19", *case)[3] == 5


def test_answers_are_kept_as_differences() -> None:
    answers = read_answers()
    assert len(answers["0.5.13"]["9.0"]) > 500
    assert FILE.stat().st_size < 400_000
