"""Memory of a loaded model beside its parameters, as logs of both engines show it."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import ModelSpec
from gateway.domain.units import GIB, MIB
from gateway.engines.common.layers.build import build
from gateway.engines.common.layers.weights import weights_bytes
from gateway.engines.common.memory.loaded_memory import position_values, segment_bytes
from gateway.models.rank import Rank
from tests.support.published import published_model

SMALL = {
    "num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072,
    "num_attention_heads": 16, "tie_word_embeddings": True,
}  # fmt: skip
LARGE = {
    "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 25600,
    "num_attention_heads": 64,
}  # fmt: skip
TINY = {
    "num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768,
}  # fmt: skip


def values_of(spec: ModelSpec, stretch: int = 1) -> int:
    return position_values(spec, build(spec), stretch)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("llama-3.1-8b", 131072 * 128),
        ("llama-3.2-1b", 131072 * 64),
        ("qwen3-8b", 40960 * 128),
        ("qwen3-next-80b-a3b", 262144 * 64),  # a quarter of each head
        ("glm-4.5-air", 131072 * 64),
        ("gemma-4-31b", 262144 * (256 + 512)),  # one table for each kind of layers
        ("gemma-3-1b", 32768 * (256 + 256)),
        ("mistral-7b-v0.1", 32768 * 128),
        ("deepseek-v2-lite", 163840 * 64),
    ],
)
def test_a_table_of_positions_is_kept_once_for_all_layers_alike(name: str, values: int) -> None:
    assert values_of(published_model(name)) == values


def test_positions_in_three_dimensions_have_longer_tables() -> None:
    spec = published_model("qwen3-vl-8b")
    assert values_of(spec, 4) == 4 * values_of(spec) == 4 * 262144 * 128
    assert values_of(published_model("qwen3-8b"), 4) == 40960 * 128


@pytest.mark.parametrize(
    ("name", "changes", "told_gib"),
    [
        ("qwen3-8b", SMALL, 1.18),  # Qwen3-Reranker-0.6B on an H100, 2026-09
        ("qwen2.5-1.5b", TINY, 0.98),  # Qwen2.5-0.5B on a shared A100, 2026-07
        ("qwen3-8b", {}, 15.28),  # on a B300, 2026-05
        ("qwen3-8b", LARGE, 61.07),  # Qwen3-32B on an H100, 2026-10
    ],
)
def test_segments_take_as_much_as_logs_of_sglang_say(
    name: str, changes: dict[str, Any], told_gib: float
) -> None:
    spec = published_model(name, **changes)
    built, rank = build(spec), Rank()
    beside_bytes = segment_bytes(built, rank, 4 * position_values(spec, built))
    assert (weights_bytes(built, rank) or 0) + beside_bytes == pytest.approx(
        told_gib * GIB, abs=0.026 * GIB
    )


def test_scales_do_not_grow_the_segments_of_their_weights() -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    built = build(published_model("qwen3-8b", quantization_config=fp8))
    assert segment_bytes(built, Rank(), 0) < 100 * MIB
