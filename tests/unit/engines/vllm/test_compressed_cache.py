"""The cache of DeepSeek V4: figures of public logs, which the engine's own sizes explain."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import AttentionGroup
from gateway.domain.units import GIB
from gateway.engines.vllm.compressed_cache import compressed_layout
from gateway.engines.vllm.kv_cache import CacheLayout
from tests.conformance.forecast_cases import family_configs

BATCH = 8192
FLASH: dict[str, Any] = family_configs()["deepseek_v4"]


def latents(layers: int, *numbers: int) -> tuple[AttentionGroup, ...]:
    return (
        AttentionGroup(
            kind="mla", layers=layers, heads=64, kv_heads=1, head_dim=512, value_dim=448,
            numbers=numbers,
        ),
    )  # fmt: skip


def layout(batches: int = 2, kv_dtype: str = "fp8_ds_mla", drafts: bool = False) -> CacheLayout:
    cache = compressed_layout(FLASH, latents(43), kv_dtype, batches, drafts=drafts)
    assert cache is not None
    return cache


def test_a_request_needs_the_bytes_that_a_refused_start_named() -> None:
    """github.com/vllm-project/vllm/issues/44376: two GPUs of 96 GB, 30,000 tokens."""
    assert layout().bytes_for(30_000, BATCH) / GIB == pytest.approx(6.66, abs=0.005)


def test_the_longest_request_is_that_of_the_engines_own_estimate() -> None:
    """The same start: 5.44 GiB are enough for 13,528 tokens."""
    longest = layout().largest(round(5.44 * GIB), BATCH, 1_048_576)
    assert longest == pytest.approx(13_528, rel=0.01)


def test_windows_of_one_batch_in_flight_take_half() -> None:
    """github.com/vllm-project/vllm/issues/51041: 7.01 GiB held 912,128 tokens with one batch."""
    one_batch, two_batches = layout(batches=1), layout(batches=2)
    assert one_batch.bytes_for(912_128, BATCH) <= 7.01 * GIB < two_batches.bytes_for(912_128, BATCH)


def test_a_layer_that_drafts_keeps_a_window() -> None:
    """44 windows fill two groups of 22, and 43 do not."""
    assert layout(drafts=True).bytes_for(30_000, BATCH) == layout().bytes_for(30_000, BATCH)
    windows = [table.layers for table in layout(drafts=True).tables if table.window == 128]
    assert 44 in windows


def test_plain_rows_are_larger_than_packed_ones() -> None:
    assert layout(kv_dtype="bfloat16").block_bytes > 1.5 * layout().block_bytes


def test_a_stage_has_the_ratios_of_its_own_layers() -> None:
    """Layers 0 to 3 have no ratio twice, then 4 and 128."""
    stage = compressed_layout(FLASH, latents(4, 0, 1, 2, 3), "fp8_ds_mla", 1)
    assert stage is not None
    assert stage.block_bytes < layout().block_bytes / 4


@pytest.mark.parametrize(
    "changes",
    [
        {"compress_ratios": None},
        {"compress_ratios": [0] * 44},
        {"compress_ratios": [8] * 44},
        {"compress_ratios": [4, True] * 22},
        {"compress_ratios": [4, 128]},
        {"sliding_window": None},
        {"head_dim": -1},
    ],
)
def test_models_of_another_kind_keep_plain_caches(changes: dict[str, Any]) -> None:
    assert compressed_layout(FLASH | changes, latents(43), "fp8_ds_mla", 1) is None
