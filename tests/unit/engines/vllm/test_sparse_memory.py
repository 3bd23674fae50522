"""Memory of the profile run for attention with an index."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain.units import MIB
from gateway.engines.vllm.sparse_memory import SparseBuffers, sparse_buffers, table_factor
from gateway.models.rank import Rank
from gateway.models.workload import Workload
from tests.conformance.forecast_cases import family_configs
from tests.support.published import config, model_from_config

V4: dict[str, Any] = family_configs()["deepseek_v4"]
LOGITS = 512 * MIB


def buffers(fields: dict[str, Any], tp: int = 2, **load: Any) -> SparseBuffers:
    values = {"batched_tokens": 8192, "seqs": 32, "graphs": True, "context": 131_072, **load}
    return sparse_buffers(model_from_config(fields), Workload("cuda", Rank(tp=tp), **values))


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3", "qwen3-30b-a3b"])
def test_models_without_an_index_need_nothing(name: str) -> None:
    assert buffers(config(name)) == SparseBuffers()


def test_logits_of_an_index_have_one_size() -> None:
    """The keys of 40 contexts are fewer bytes than the latents of five."""
    found_buffers = buffers(config("deepseek-v3.2"), tp=8)
    assert found_buffers == SparseBuffers(LOGITS, 5 * 131_072 * 576 * 2)


def test_four_streams_and_padded_heads_count_for_compressed_keys() -> None:
    """Ten times the hidden states of a batch; queries and output of 64 heads on ranks with 32."""
    hidden_bytes, head_bytes = 8192 * 4096 * 2, 8192 * 64 * 512 * 2
    assert buffers(V4).peak_bytes == LOGITS + 10 * hidden_bytes + 2 * head_bytes
    assert buffers(V4, tp=1).peak_bytes == LOGITS + 10 * hidden_bytes + head_bytes
    assert buffers(V4, has_drafter=True).peak_bytes == buffers(V4).peak_bytes + 15 * hidden_bytes


def test_gathered_keys_grow_with_the_context_by_their_ratio() -> None:
    whole = buffers(V4, context=1_048_576).workspace_bytes
    assert whole == 40 * 1_048_576 // 4 * 132
    assert buffers(V4, context=4096).workspace_bytes == 4 * (1024 + 128 + 8192) * 512 * 2


@pytest.mark.parametrize("value", [True, -1, 2**40, "4", None])
def test_wrong_sizes_count_as_absent(value: object) -> None:
    assert buffers(V4 | {"hc_mult": value}).peak_bytes == LOGITS + 2 * 8192 * 64 * 512 * 2


def test_layers_that_compress_keys_have_a_table_of_positions_of_their_own() -> None:
    assert table_factor(model_from_config(V4)) == 4
    assert table_factor(model_from_config(config("deepseek-v3.2"))) == 1
