"""The cache of vLLM versions without rules is that of their own code."""

from __future__ import annotations

import pytest

from gateway.profiles.profiles import Profiles
from tests.conformance.cache_cases import cases, read_answers
from tests.conformance.cache_traits import CACHE_TRAITS, wrong_cases


@pytest.mark.parametrize("version", list(read_answers()))
def test_a_version_without_rules_has_the_traits_of_its_own_cache(version: str) -> None:
    keys = {case.key for case in cases()}
    assert all(keys == answers.keys() for answers in read_answers()[version].values())
    assert wrong_cases(version, Profiles().engine(f"vllm=={version}").traits) == []


def test_traits_that_another_version_has_are_taken_away() -> None:
    """Since 0.28.0 prefixes of recurrent states are cached, and a state is not kept per block."""
    traits = {*Profiles().engine("vllm==0.29.0").traits}
    assert traits & CACHE_TRAITS == {"null_block", "prefixes_of_states", "windows_of_more_batches"}
