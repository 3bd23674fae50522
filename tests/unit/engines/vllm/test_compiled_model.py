"""The form of a compiled model in the cache."""

from __future__ import annotations

import pytest

from gateway.engines.vllm.compiled_model import TRAIT, VARIABLE, compile_variables
from gateway.profiles.profiles import Profiles
from tests.support.makers import engine

VLLM = engine(traits=(TRAIT,))


def test_a_compiled_model_is_kept_in_one_piece() -> None:
    choice = compile_variables(VLLM, {})[VARIABLE]
    assert choice.value == "1"
    assert "faster" in choice.reason


@pytest.mark.parametrize(
    "name",
    [
        VARIABLE,
        "VLLM_USE_STANDALONE_COMPILE",
        "VLLM_USE_AOT_COMPILE",
        "VLLM_DISABLE_COMPILE_CACHE",
    ],
)
def test_a_form_of_the_user_stays(name: str) -> None:
    assert compile_variables(VLLM, {name: "0"}) == {}


def test_other_versions_are_left_to_the_engine() -> None:
    assert compile_variables(engine(), {}) == {}


def test_the_measured_version_has_the_trait_and_the_variable() -> None:
    profile = Profiles(None).engine("vllm==0.26.0")
    assert compile_variables(profile, {})
    assert VARIABLE in profile.user_env
