"""Bytes against the engine's own: weights per rank and KV cache.

The truth is what vLLM's own model classes allocate, built without data for an imaginary GPU of compute capability 9.0,
in bfloat16; versions 0.18.0, 0.19.1, 0.26.0 and 0.33.0 agree unless a test says otherwise. One exception is not modelled:
on compute capability 10, 0.33.0 pads the experts' size on each rank to a multiple of 128 (FlashInfer's TensorRT-LLM kernels).
"""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.memory import (
    GIB,
    activation_bytes,
    kv_bytes_for,
    kv_bytes_per_token,
    largest_context,
    memory,
    position_bytes,
    rank_bytes,
    weights_bytes,
)
from gateway.core.reading import read_model
from gateway.domain import ModelSpec, TensorGroup
from gateway.errors import BadModel
from tests.published import CONFIGS, TENSORS, config, published, tensors

pytestmark = pytest.mark.unit

BLOCK = 16
# Parameter bytes of rank 0, and bytes of one block of KV cache in one layer, by tensor parallel size.
ENGINE: dict[str, tuple[dict[int, int], dict[int, int]]] = {
    "llama-3.1-8b": (
        {1: 16060522496, 2: 8030527488, 4: 4015529984, 8: 2008031232},
        {1: 65536, 2: 32768, 4: 16384, 8: 8192},
    ),
    "llama-3.2-1b": ({1: 2471628800, 2: 1235881984, 4: 618008576, 8: 309071872}, {1: 32768, 2: 16384, 4: 8192, 8: 4096}),
    "mistral-7b-v0.1": (
        {1: 14483464192, 2: 7241998336, 4: 3621265408, 8: 1810898944},
        {1: 65536, 2: 32768, 4: 16384, 8: 8192},
    ),
    "mistral-7b-v0.3": (
        {1: 14496047104, 2: 7248289792, 4: 3624411136, 8: 1812471808},
        {1: 65536, 2: 32768, 4: 16384, 8: 8192},
    ),
    "qwen2.5-7b": ({1: 15231233024, 2: 7615820800, 4: 3808114688}, {1: 32768, 2: 16384, 4: 8192}),
    "qwen2.5-1.5b": ({1: 3087428608, 2: 1543801856, 4: 783005696}, {1: 16384, 2: 8192, 4: 8192}),
    "qwen3-8b": ({1: 16381470720, 2: 8191043584, 4: 4095830016, 8: 2048223232}, {1: 65536, 2: 32768, 4: 16384, 8: 8192}),
    "qwen3-30b-a3b": (
        {1: 61064245248, 2: 30544916480, 4: 15285252096, 8: 7680585728},
        {1: 32768, 2: 16384, 4: 8192, 8: 8192},
    ),
    "mixtral-8x7b": (
        {1: 93405585408, 2: 46704107520, 4: 23353368576, 8: 11677999104},
        {1: 65536, 2: 32768, 4: 16384, 8: 8192},
    ),
    "granite-3.1-2b": ({1: 5067313152, 2: 2533822464, 4: 1267077120, 8: 633704448}, {1: 32768, 2: 16384, 4: 8192, 8: 4096}),
    "qwen1.5-moe-a2.7b": (
        {1: 28631568384, 2: 14318882816, 4: 7162540032, 8: 3584368640},
        {1: 131072, 2: 65536, 4: 32768, 8: 16384},
    ),
}
# The same for what configs may say beside: biases, layers without experts, pooling (which drops the head).
VARIANTS: list[tuple[str, Literal["generate", "embed"] | None, dict[str, Any], dict[int, int]]] = [
    ("llama-3.1-8b", None, {"num_hidden_layers": 2, "tie_word_embeddings": True, "attention_bias": True}, {1: 1923170304, 8: 240446464}),
    ("granite-3.1-2b", None, {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True}, {1: 444973056, 4: 111270912}),
    ("qwen3-8b", None, {"num_hidden_layers": 2, "attention_bias": True}, {1: 3261137920, 8: 407678976}),
    ("qwen3-30b-a3b", None, {"num_hidden_layers": 6, "mlp_only_layers": [0], "decoder_sparse_step": 2}, {1: 5323152384, 8: 669965312}),
    ("qwen1.5-moe-a2.7b", None, {"num_hidden_layers": 6, "mlp_only_layers": [1], "decoder_sparse_step": 2}, {1: 3938029568, 2: 1969291264}),
    ("qwen3-8b", "embed", {"vocab_size": 151665}, {1: 15134713856, 2: 7567665152}),
]  # fmt: skip
SIZES = [(name, tp) for name, (weights, _) in ENGINE.items() for tp in weights]


@pytest.mark.parametrize(("name", "tp"), SIZES)
def test_weights_and_kv_cache_are_the_engines_to_the_byte(name: str, tp: int) -> None:
    weights, blocks = ENGINE[name]
    spec = published(name)
    assert weights_bytes(spec, tp, "bfloat16") == weights[tp]
    layers = sum(group.layers for group in spec.attention)
    assert kv_bytes_per_token(spec, tp, "bfloat16") * BLOCK == blocks[tp] * layers


@pytest.mark.parametrize(("name", "task", "changes", "weights"), VARIANTS)
def test_weights_follow_biases_sparse_layers_and_the_task(
    name: str, task: Literal["generate", "embed"] | None, changes: dict[str, Any], weights: dict[int, int]
) -> None:
    spec = published(name, task, **changes)
    assert {tp: weights_bytes(spec, tp, "bfloat16") for tp in weights} == weights


def test_float32_weights_are_cast_and_packed_ones_are_not() -> None:
    spec = published("llama-3.2-1b")
    assert weights_bytes(spec, 1, "float32") == 2 * weights_bytes(spec, 1, "float16")
    packed = TensorGroup(name="a.qweight", count=3, shape=(8, 8), dtype="I32", shard="replicated")
    assert rank_bytes(packed, spec, 1, "bfloat16") == 3 * 64 * 4
    eight = TensorGroup(name="a.weight", count=1, shape=(8, 8), dtype="F8_E4M3", shard="replicated")
    assert rank_bytes(eight, spec, 1, "bfloat16") == 64 * 2
    quantized = published("llama-3.2-1b", None, quantization_config={"quant_method": "fp8"})
    assert rank_bytes(eight, quantized, 1, "bfloat16") == 64


def test_one_request_takes_whole_blocks_of_every_layer() -> None:
    spec = published("qwen3-8b")
    assert kv_bytes_for(spec, 2, "bfloat16", 40960, 2048, BLOCK) == 83886080 * 36
    assert kv_bytes_for(spec, 2, "bfloat16", 1, 2048, BLOCK) == 32768 * 36


def test_a_sliding_layer_keeps_its_window_and_two_batches_in_flight() -> None:
    # 0.26.0 and 0.33.0 say 513 blocks; 0.18.0 and 0.19.1 counted one batch in flight, 385 blocks.
    spec = published("mistral-7b-v0.1")
    assert kv_bytes_for(spec, 1, "bfloat16", 32768, 2048, BLOCK) == 513 * 65536 * 32
    assert kv_bytes_for(spec, 1, "bfloat16", 100, 2048, BLOCK) == 8 * 65536 * 32


@pytest.mark.parametrize(("layers", "full", "concurrency"), [(62, 10, 2.59), (34, 5, 5.18)])
def test_mixed_layers_are_padded_into_equal_groups(layers: int, full: int, concurrency: float) -> None:
    # Gemma 3: every sixth layer is full. `concurrency` is what 0.26.0 says for 4 GiB and requests of 131072 tokens.
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "hidden_size": 256}
    fields = {"model_type": "gemma3_text", "sliding_window": 1024, "num_hidden_layers": layers, **shape}
    spec = read_model("g", None, config("llama-3.1-8b", **fields), {}, None, (), None)
    assert [group.layers for group in spec.attention] == [full, layers - full]
    needed = kv_bytes_for(spec, 1, "bfloat16", 131072, 2048, BLOCK)
    assert needed == (8192 + 6 * 321) * full * 16384
    blocks = 4 * GIB // (16384 * full)
    assert round(blocks * 16384 * full / needed, 2) == concurrency
    assert kv_bytes_per_token(spec, 1, "bfloat16") * BLOCK == 16384 * full


def test_nearly_equal_counts_are_padded_to_the_larger() -> None:
    kinds = ["full_attention"] * 12 + ["sliding_attention"] * 13
    spec = published("llama-3.1-8b", num_hidden_layers=25, layer_types=kinds, sliding_window=128)
    assert kv_bytes_per_token(spec, 1, "bfloat16") * BLOCK == 65536 * 13


def test_the_largest_context_is_the_engines_estimate() -> None:
    # 0.26.0 refuses 40960 tokens with 4 GiB of cache, and estimates 29120.
    spec = published("qwen3-8b")
    assert largest_context(spec, 1, "bfloat16", 4 * GIB, 2048, BLOCK, 40960) == 29120
    assert largest_context(spec, 1, "bfloat16", 64 * GIB, 2048, BLOCK, 40960) == 40960
    assert largest_context(spec, 1, "bfloat16", 65536 * 36 - 1, 2048, BLOCK, 40960) == 0


def test_the_table_of_positions_is_the_engines() -> None:
    assert position_bytes(published("llama-3.1-8b"), "bfloat16") == 33554432
    assert position_bytes(published("llama-3.2-1b"), "bfloat16") == 16777216
    assert position_bytes(published("qwen3-8b"), "bfloat16") == 10485760
    longer = (
        sized(published("llama-3.1-8b")).overhead_bytes
        - sized(published("llama-3.1-8b", max_position_embeddings=1)).overhead_bytes
    )
    assert longer == 131071 * 128 * 2


def sized(spec: ModelSpec, tp: int = 1, budget: int = 24 * GIB, device: str = "cuda") -> Any:
    return memory(
        spec,
        device=device,
        device_bytes=24 * GIB,
        budget_bytes=budget,
        tp=tp,
        dtype="bfloat16",
        batched_tokens=2048,
        seqs=256,
        graphs=True,
    )


def test_what_is_left_of_the_budget_is_kv_cache() -> None:
    size = sized(published("llama-3.1-8b"))
    used = size.weights_bytes + size.activation_bytes + size.graph_bytes + size.overhead_bytes
    assert size.kv_bytes == 24 * GIB - used
    assert size.kv_tokens == size.kv_bytes // size.kv_bytes_per_token
    assert size.weights_bytes < size.low < used < size.high
    assert sized(published("llama-3.1-8b"), budget=8 * GIB).kv_bytes == 0
    assert sized(published("llama-3.1-8b"), tp=2).weights_bytes < size.weights_bytes


def test_an_encoder_keeps_no_kv_cache() -> None:
    shapes = tensors({"embeddings.word_embeddings.weight": (30522, 768)})
    fields = {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 768}
    fields |= {"num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 30522}
    spec = read_model("b", None, fields, shapes, None, (), None)
    size = sized(spec)
    assert (size.kv_bytes, size.kv_bytes_per_token, size.kv_tokens) == (0, 0, 0)
    assert kv_bytes_for(spec, 1, "bfloat16", 512, 2048, BLOCK) == 0
    assert largest_context(spec, 1, "bfloat16", 0, 2048, BLOCK, 512) == 512


@given(CONFIGS, st.none() | TENSORS, st.integers(1, 8), st.sampled_from(["bfloat16", "float32"]), st.integers(0, 10**13))
def test_no_model_that_was_read_breaks_the_arithmetic(
    fields: dict[str, Any], headers: dict[str, Any] | None, tp: int, dtype: str, kv_bytes: int
) -> None:
    try:
        spec = read_model("m", None, fields, headers, None, (), None)
    except BadModel:
        return
    assert weights_bytes(spec, tp, dtype) >= 0
    assert kv_bytes_per_token(spec, tp, dtype) >= 0
    assert activation_bytes(spec, tp, dtype, 2048, 256) > 0
    length = largest_context(spec, tp, dtype, kv_bytes, 2048, BLOCK, spec.max_position)
    assert 0 <= length <= spec.max_position
    assert length == 0 or kv_bytes_for(spec, tp, dtype, length, 2048, BLOCK) <= kv_bytes
    for device in ("cuda", "cpu"):
        size = sized(spec, tp, kv_bytes, device)
        assert 0 <= size.low <= size.high
