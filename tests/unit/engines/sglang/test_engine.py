"""CUDA graphs of decoding for the planned requests at once, where SGLang would capture fewer, and
flags that limit its cache."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import Plan
from gateway.profiles.profiles import Profiles
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import published_model
from tests.support.versions import NEWEST_SGLANG, SGLANG

PROFILES = Profiles()
FLAGS = ("--cuda-graph-max-bs-decode", "--cuda-graph-max-bs")


def make_plan(machine: str, version: str = NEWEST_SGLANG, **wishes: Any) -> Plan:
    """The first plan for an 8B model."""
    engine = PROFILES.engine(f"sglang=={version}")
    hardware = PROFILES.hardware(machine)
    rules = PROFILES.rules([engine])
    return decide(
        published_model("qwen3-8b"), hardware, [engine], wish(**wishes), rules=rules
    ).plans[0]


def graphs(plan: Plan) -> int | None:
    """The largest batch with a graph that the command line names."""
    values = [item.partition("=")[2] for item in plan.argv if item.partition("=")[0] in FLAGS]
    return int(values[0]) if values else None


@pytest.mark.parametrize("version", SGLANG)
@pytest.mark.parametrize(
    ("machine", "concurrency", "expected"),
    [
        ("l40s", 64, 64),  # 48 GB: 32 by SGLang's own choice
        ("l40s", 256, 256),
        ("l40s", 32, None),
        ("h200", 128, None),  # 256
        ("8xh100", 200, None),
    ],
)
def test_decoding_has_graphs_for_the_planned_requests(
    version: str, machine: str, concurrency: int, expected: int | None
) -> None:
    plan = make_plan(machine, version, concurrency=concurrency)
    assert graphs(plan) == expected
    assert ("planned concurrent requests" in plan.enforce_eager.reason) is (expected is not None)


def test_graphs_cover_no_more_requests_than_the_engine_admits() -> None:
    capped_plan = make_plan("l40s", concurrency=64, args={"max-running-requests": 40})
    assert graphs(capped_plan) == 40
    eager = make_plan("l40s", concurrency=64, args={"disable-cuda-graph": True})
    assert graphs(eager) is None


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("cuda-graph-max-bs-decode", 16),
        ("cuda-graph-max-bs-decode", 96),
        ("cuda-graph-bs-decode", 8),
    ],
)
def test_the_users_graphs_win(flag: str, value: int) -> None:
    plan = make_plan("l40s", concurrency=64, args={flag: value})
    assert [item for item in plan.argv if "cuda-graph" in item] == [f"--{flag}={value}"]


def test_the_memory_of_more_graphs_is_counted() -> None:
    usual, more = make_plan("l40s", concurrency=32), make_plan("l40s", concurrency=256)
    extra_bytes = more.memory.activation_bytes - usual.memory.activation_bytes
    assert extra_bytes == (256 - 32) * 2 * 1024**2
    assert more.memory.kv_tokens < usual.memory.kv_tokens


def test_the_token_limit_of_the_user_sets_the_cache() -> None:
    plan = make_plan("h200", args={"max-total-tokens": 4096})
    assert plan.memory.kv_tokens == plan.max_model_len.value == 4096
    assert plan.memory.kv_bytes == 4096 * plan.memory.kv_bytes_per_token
    assert "--max-total-tokens=4096" in plan.argv
