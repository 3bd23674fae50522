"""The longest input, with the field or the default that it comes from."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BadModel
from gateway.models.context_limit import FIRST_LENGTH, YARN_SCALES, context_limit
from gateway.models.default_lengths import DEFAULTS
from tests.support.paths import MODELS
from tests.support.published import config

WHISPER = {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"}


def test_a_speech_model_has_the_limit_of_its_decoder() -> None:
    limit = context_limit(WHISPER | {"max_target_positions": 448, "max_source_positions": 1500})
    assert limit == (448, "max_target_positions in config.json", False)


# Answers of vLLM 0.32.0 and transformers 5.19.0 for these configs (_get_and_verify_max_len).
VLLM_READS: list[tuple[dict[str, Any], int, str]] = [
    (WHISPER, 448, "transformers' default of max_target_positions for whisper"),
    ({"model_type": "llama"}, 2048, "transformers' default of max_position_embeddings for llama"),
    ({"model_type": "gpt2", "n_positions": 512}, 512, "n_positions in config.json"),
    (
        {"model_type": "llama", "max_position_embeddings": 4096, "model_max_length": 8192},
        8192,
        "model_max_length in config.json",
    ),
    (
        {"model_type": "qwen2", "max_position_embeddings": 100, "seq_length": 50},
        50,
        "seq_length in config.json",
    ),
    (
        {
            "model_type": "llama",
            "max_position_embeddings": 4096,
            "rope_scaling": {"type": "linear", "factor": 2.5},
        },
        10240,
        "max_position_embeddings in config.json, times 2.5 of rope_scaling",
    ),
    (
        {
            "model_type": "qwen2",
            "max_position_embeddings": 32768,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        },
        32768,
        "max_position_embeddings in config.json",
    ),
    (
        {"model_type": "mllama", "text_config": {"max_position_embeddings": 7}},
        7,
        "max_position_embeddings in config.json",
    ),
    (
        {"model_type": "llava", "text_config": {"model_type": "llama"}},
        2048,
        "transformers' default of max_position_embeddings for llama",
    ),
    (
        {"model_type": "voxtral", "text_config": {"model_type": "llama"}},
        131072,
        "transformers' default of max_position_embeddings for voxtral",
    ),
    (
        {"model_type": "gemma3_text", "max_position_embeddings": 9, "rope_scaling": {"factor": 8}},
        9,
        "max_position_embeddings in config.json",
    ),
    ({"model_type": "roberta", "max_position_embeddings": 514}, 512, "less 2 positions of padding"),
]


@pytest.mark.parametrize(("fields", "tokens", "words"), VLLM_READS)
def test_vllm_reads_the_smallest_length(fields: dict[str, Any], tokens: int, words: str) -> None:
    limit = context_limit(fields)
    assert (limit.tokens, limit.is_open) == (tokens, False)
    assert words in limit.source


def test_no_limit_is_called_the_engines_default() -> None:
    limit = context_limit({"model_type": "bloom"})
    assert limit == (2048, "the engine's default; no file names a limit", True)
    assert not context_limit({"model_type": "bloom"}, traits=[FIRST_LENGTH]).is_open


def test_sglang_takes_the_first_length() -> None:
    fields = {"model_type": "llama", "max_position_embeddings": 4096, "max_seq_len": 8192}
    assert context_limit(fields, traits=[FIRST_LENGTH]).tokens == 8192
    assert context_limit(fields).tokens == 4096
    # SGLang reads none of Whisper's fields. The model's own limit holds all the same.
    assert context_limit(WHISPER, traits=[FIRST_LENGTH]).tokens == 448


def test_yarn_once_multiplied_the_original_length() -> None:
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    fields = {"model_type": "qwen3", "max_position_embeddings": 40960, "rope_scaling": rope}
    assert context_limit(fields, traits=[YARN_SCALES]).tokens == 131072
    assert context_limit(fields).tokens == 40960
    assert context_limit(fields, traits=[FIRST_LENGTH]).tokens == 40960


@pytest.mark.parametrize("kind", [None, ["yarn"], 3])
@pytest.mark.parametrize("traits", [(), [YARN_SCALES], [FIRST_LENGTH]])
def test_a_kind_of_rope_that_is_no_text_is_an_unknown_kind(kind: object, traits: list[str]) -> None:
    rope = {"rope_type": kind, "factor": 2.0}
    fields = {"model_type": "qwen3", "max_position_embeddings": 4096, "rope_parameters": rope}
    assert context_limit(fields, traits=traits).tokens == 8192
    by_layer = {"full_attention": {"rope_type": {"a": kind}, "factor": 2.0}}
    assert context_limit({**fields, "rope_parameters": by_layer}).tokens == 8192


def test_an_endless_length_is_none() -> None:
    fields = {"model_type": "llama", "max_position_embeddings": 9, "model_max_length": 10**30}
    assert context_limit(fields).tokens == 9


@pytest.mark.parametrize("wrong", [0, -1, "4096", True, 1.5])
def test_a_length_that_is_no_number_is_a_bad_model(wrong: object) -> None:
    with pytest.raises(BadModel, match="max_position_embeddings"):
        context_limit({"model_type": "llama", "max_position_embeddings": wrong})


@given(
    name=st.sampled_from(sorted(path.stem for path in MODELS.glob("*.json"))),
    removed=st.sets(st.sampled_from(["max_position_embeddings", "max_seq_len", "n_positions"])),
    traits=st.sets(st.sampled_from([FIRST_LENGTH, YARN_SCALES])),
)
def test_a_source_names_a_field_that_the_file_has(
    name: str, removed: set[str], traits: set[str]
) -> None:
    fields = config(name)
    blocks = [fields, *(value for value in fields.values() if isinstance(value, dict))]
    for block in blocks:
        for field in removed:
            block.pop(field, None)
    source = context_limit(fields, traits=traits).source
    if source.endswith(" in config.json"):
        assert any(source.removesuffix(" in config.json") in block for block in blocks)


def test_defaults_are_lengths() -> None:
    assert DEFAULTS["whisper"] == {"max_target_positions": 448}
    assert all(length > 0 for fields in DEFAULTS.values() for length in fields.values())
