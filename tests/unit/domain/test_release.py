"""The order of versions, and their forms."""

from __future__ import annotations

import pytest

from gateway.domain.release import engine_name, release
from gateway.profiles.profiles import Profiles


def test_versions_stand_in_the_order_of_their_releases() -> None:
    versions = [
        "0.33.0",
        "0.5.10",
        "0.19.1",
        "0.5.10.post1",
        "nightly",
        "0.5.9",
        "0.5.23",
        "0.5.10rc1",
    ]
    assert sorted(versions, key=release) == [
        "nightly",
        "0.5.9",
        "0.5.10rc1",
        "0.5.10",
        "0.5.10.post1",
        "0.5.23",
        "0.19.1",
        "0.33.0",
    ]


def test_a_driver_is_compared_part_by_part() -> None:
    assert release("580.95.05") == release("580.95.5")
    assert release("570.124.06") < release("580.65.06")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("vllm==0.33.0", "vllm==0.33.0"),
        ("vllm", "vllm"),
        ("vLLM", "vllm"),
        ("vllm@0.33.0", "vllm==0.33.0"),
        ("vLLM==v0.33", "vllm==0.33"),
        ("vllm 0.33", "vllm==0.33"),
        ("vllm=0.33.0", "vllm==0.33.0"),
        ("sglang:0.5.23", "sglang==0.5.23"),
        ("sglang-0.5.10.post1", "sglang==0.5.10.post1"),
        ("vllm>=0.33", "vllm>=0.33"),  # a bound is no version, and is refused with this text
        ("", ""),
    ],
)
def test_a_name_is_its_kind_and_version(text: str, name: str) -> None:
    assert engine_name(text) == name


def test_equal_versions_are_one_engine() -> None:
    profiles = Profiles()
    assert profiles.engine("vllm==0.33").ref == "vllm==0.33.0"
    assert profiles.engine("vllm==0.33.0.0").guessed_from is None
    assert profiles.engine("vllm==0.33.77").version == "0.33.77"
