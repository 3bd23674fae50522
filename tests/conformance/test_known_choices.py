"""Versions between those with rules choose as their own code does."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.profiles.profiles import Profiles
from tests.conformance.choice_cases import Case, cases, read_answers
from tests.conformance.known_choices import choices_of, rule_answer

PROFILES = Profiles()
RULED = [ref for ref in PROFILES.engine_files if ref.startswith("sglang==")]
GUESSED = sorted(ref for ref in PROFILES.diff_files if ref.startswith("sglang=="))
ASKED = [
    (f"sglang=={version}", capability)
    for version, by_capability in read_answers().items()
    for capability in by_capability
]


@pytest.mark.parametrize("ref", GUESSED)
def test_a_profile_has_the_choices_that_the_kept_answers_show(ref: str) -> None:
    engine = PROFILES.engine(ref)
    near = str(engine.guessed_from)
    assert engine.choices == choices_of(PROFILES, ref, near, [one for one in RULED if one != near])


@pytest.mark.parametrize(("ref", "capability"), ASKED)
def test_the_forecast_of_a_version_is_what_its_code_answered(ref: str, capability: str) -> None:
    answers = read_answers()[ref.partition("==")[2]][capability]
    asked = [case for case in cases() if case.key in answers]
    wrong = [
        (case.key, answers[case.key], chosen)
        for case in asked
        if (chosen := rule_answer(PROFILES, ref, case, capability)) != answers[case.key]
    ]
    assert len(wrong) <= len(asked) * 0.05, wrong


def forecast(version: str, capability: str, *case: str) -> Any:
    return rule_answer(PROFILES, f"sglang=={version}", Case(*case), capability)


def test_gemma_4_on_data_center_blackwell() -> None:
    """github.com/sgl-project/sglang pull request 25006, merged after 0.5.12."""
    case = "attention_backends", "gemma-4-26b-a4b"
    assert forecast("0.5.12", "10.0", *case) == ["triton", "triton", 1]
    assert forecast("0.5.14", "10.0", *case) == ["trtllm_mha", "trtllm_mha", 64]


def test_experts_of_minimax_m2_in_nvfp4() -> None:
    case = "moe", "minimax-m2", "modelopt", "nvfp4"
    method = "ModelOptNvFp4FusedMoEMethod"
    assert forecast("0.5.12", "10.0", *case) == [method, "flashinfer_trtllm"]
    assert forecast("0.5.23", "10.0", *case) == [method, "flashinfer_trtllm_routed"]


def test_an_architecture_that_the_nearest_rules_do_not_describe() -> None:
    case = "attention_backends", "kimi_k25"
    assert forecast("0.5.10.post1", "10.0", *case) == "unknown"
    assert forecast("0.5.12", "10.0", *case) == ["trtllm_mla", "trtllm_mla", 64]
