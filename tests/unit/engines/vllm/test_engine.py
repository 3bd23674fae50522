"""Batches in flight of vLLM, by the settings that decide whether two of them overlap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.published import config
from tests.support.reported_plans import make_decision
from tests.support.versions import VLLM_REF

BATCH, LENGTH = 8192, 32768
# Blocks of one request of gemma-3-4b: 2048 in the one table of full layers; in each of six tables
# of a window of 1024 tokens, those of the window and of every batch in flight, and one more.
SERIAL_BLOCKS, OVERLAP_BLOCKS = (
    2048 + 6 * (-(-(1023 + batches * BATCH) // 16) + 1) for batches in (1, 2)
)


def requests_of(model: str, hardware: str = "3090", **wish: Any) -> float:
    """Requests of LENGTH tokens that the cache of the first plan holds."""
    args = {
        "gpu-memory-utilization": 0.9, "max-model-len": LENGTH, "max-num-batched-tokens": BATCH,
        "max-num-seqs": 8,
    }  # fmt: skip
    decision = make_decision(
        config(model), hardware, VLLM_REF, **wish | {"args": args | wish.get("args", {})}
    )
    memory = decision.plans[0].memory
    assert memory is not None
    assert memory.full_requests is not None
    return memory.full_requests


@pytest.mark.parametrize(
    "wish",
    [
        {"args": {"async-scheduling": False}},
        {"args": {"runner": "pooling"}},
        {"speculative": "ngram"},
    ],
    ids=["switched-off", "pooling", "ngram"],
)
def test_batches_that_do_not_overlap_leave_room_for_more_requests(wish: Mapping[str, Any]) -> None:
    gain = requests_of("gemma-3-4b", **wish) / requests_of("gemma-3-4b")
    assert gain == pytest.approx(OVERLAP_BLOCKS / SERIAL_BLOCKS, rel=0.02)


def test_the_first_runner_overlaps_no_batches_of_stages() -> None:
    args = {"pipeline-parallel-size": 2}
    first_runner, second_runner = (
        requests_of("gemma-3-4b", "2x3090", args=args, env={"VLLM_USE_V2_MODEL_RUNNER": number})
        for number in "01"
    )
    assert first_runner > 1.2 * second_runner
