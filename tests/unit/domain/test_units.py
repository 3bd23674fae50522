"""Durations, numbers of tokens and sizes in words, read and printed."""

import pytest

from gateway.domain import Policy
from gateway.domain.units import (
    day_text,
    duration,
    duration_text,
    format_bytes,
    sentence,
    token_count,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5m", 300),
        ("300", 300),
        (300, 300),
        ("1h30m", 5400),
        ("-1", -1),
        (-1, -1),
        (0, 0),
        ("0", 0),
        ("-5m", -1),
        ("250ms", 0.25),
        ("1.5h", 5400),
        (" 10S ", 10),
        (2.5, 2.5),
    ],
)
def test_a_keep_alive_is_read_as_ollama_reads_it(text: object, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("8192", 8192),
        (8192, 8192),
        ("32k", 32768),
        ("1m", 1048576),
        ("1.5k", 1536),
        ("40,960", 40960),
    ],
)
def test_tokens_are_read_as_people_write_them(text: object, tokens: int) -> None:
    assert token_count(text) == tokens


@pytest.mark.parametrize(
    "value", ["", "k", "0", 0, -5, "-1k", "many", "1e9", "0.0001", True, None, [5], 1.5, "9" * 99]
)
def test_a_malformed_number_of_tokens_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="looks like 8192, 32k"):
        token_count(value)


@pytest.mark.parametrize(
    "value",
    ["", "m", "5 m", "5d", "1h 30m", "five", "1e9", "inf", "nan", True, None, [5], "5m5", "--5m"],
)
def test_a_malformed_duration_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="looks like 5m, 1h30m or 300"):
        duration(value)


@pytest.mark.parametrize(
    ("seconds", "words"), [(-1, "for ever"), (0, "0s"), (5400, "1h30m"), (61, "1m1s"), (0.2, "0s")]
)
def test_a_duration_is_printed_as_users_write_it(seconds: float, words: str) -> None:
    assert duration_text(seconds) == words


def test_a_policy_keeps_seconds() -> None:
    assert Policy.model_validate({"keep_alive": "5m"}).keep_alive == 300
    assert (
        Policy.model_validate_json(
            Policy.model_validate({"keep_alive": "-1"}).model_dump_json()
        ).keep_alive
        == -1
    )
    assert Policy().keep_alive is None


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (512, "512 bytes"),
        (5000, "4.9 KiB"),
        (300_000, "0.3 MiB"),
        (3 * 2**20, "3.0 MiB"),
        (2**30, "1.0 GiB"),
    ],
)
def test_no_file_with_content_has_the_size_zero(count: int, words: str) -> None:
    assert format_bytes(count) == words


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("the model has no head", "The model has no head."),
        ("config.json lists no module", "config.json lists no module."),
        ("--tp 3 divides nothing", "--tp 3 divides nothing."),
        ("max_seqs is 0", "max_seqs is 0."),
        ("nothing.", "Nothing."),
    ],
)
def test_a_name_at_the_start_keeps_its_spelling(words: str, expected: str) -> None:
    assert sentence(words) == expected


@pytest.mark.parametrize(
    ("time_s", "words"),
    [
        (0.0, "1970-01-01"),
        (951_782_400, "2000-02-29"),
        (1_767_225_599.9, "2025-12-31"),
        (None, "an unknown day"),
    ],
)
def test_a_time_is_a_day_of_utc(time_s: float | None, words: str) -> None:
    assert day_text(time_s) == words
