"""Switches of an engine for the part that a failure names."""

import pytest

from gateway.diagnosis.clues.switches import off_switch

VARIABLES = (
    "FROB_CACHE_DIR",
    "SGLANG_ENABLE_JIT_FROBGEMM",
    "VLLM_DISABLE_FROB_STREAM",
    "VLLM_FROB_TIMEOUT_S",
    "VLLM_USE_FROB",
    "VLLM_USE_FROB_SAMPLER",
    "VLLM_USE_FROB_SAMPLER_FP8",
    "VLLM_USE_V9_FROB_RUNNER",
)


@pytest.mark.parametrize(
    ("message", "switch"),
    [
        ("The frob sampler rejects 3 rows", "VLLM_USE_FROB_SAMPLER=0"),
        ("FrobSampler has no kernel", "VLLM_USE_FROB_SAMPLER=0"),
        ("The FP8 frob sampler has no kernel", "VLLM_USE_FROB_SAMPLER_FP8=0"),
        ("Frob Runner V9 supports no pages", "VLLM_USE_V9_FROB_RUNNER=0"),
        ("The frob stream is not captured", "VLLM_DISABLE_FROB_STREAM=1"),
        ("A JIT FROBGEMM kernel failed", "SGLANG_ENABLE_JIT_FROBGEMM=0"),
    ],
)
def test_the_longest_name_that_stands_in_the_message_is_the_switch(
    message: str, switch: str
) -> None:
    assert off_switch(message, (), VARIABLES) == switch


def test_a_file_of_the_traceback_names_a_part() -> None:
    assert off_switch("a bad size", ["frob_sampler.py"], VARIABLES) == "VLLM_USE_FROB_SAMPLER=0"


@pytest.mark.parametrize(
    "message",
    [
        "a sampler of a wide and very old frob",
        "the timeout of frob",
        "no frob",
        "Set VLLM_USE_FROB_SAMPLER=1 for the frob sampler",
        "",
    ],
)
def test_words_apart_a_short_word_and_a_named_variable_name_no_switch(message: str) -> None:
    assert off_switch(message, (), VARIABLES) == ""
