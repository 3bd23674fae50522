"""The memory of a GPU beside weights and KV cache
(tests/unit/engines/common/layers/test_weights.py, tests/unit/engines/vllm/test_kv_cache.py), and
how it adds up."""

from __future__ import annotations

import functools
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import GpuProcess, Hardware, Link, Memory, ModelSpec, Plan
from gateway.domain.units import GIB
from gateway.engines.common.layers.build import build
from gateway.engines.common.layers.built_model import BuiltModel
from gateway.engines.common.layers.weights import weights_bytes
from gateway.engines.common.planning_input import driver_bytes
from gateway.engines.vllm.kv_cache import CacheLayout, plan_cache_layout
from gateway.engines.vllm.memory import (
    activation_bytes,
    graph_sizes,
    rank_memory,
    runner_bytes,
)
from gateway.errors import BadModel
from gateway.models.rank import Rank
from gateway.models.workload import Workload
from gateway.profiles.profiles import Profiles
from tests.conformance.layer_cases import case
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import (
    CONFIGS,
    TENSORS,
    TRAITS,
    model_from_config,
    published_model,
    tensors,
)

PROFILES = Profiles()
ENGINES = PROFILES.engines(("vllm==0.26.0",), device="cuda")
RULES = PROFILES.rules(ENGINES)
# Starts of vLLM 0.26.0 on H200 GPUs on 2026-11-21 with the planner's own flags and dummy weights,
# as its logs told them. `used_gib` is the most that NVML saw in use; `runner` which of the engine's
# model runners it chose.
MEASURED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "measured_memory.json").read_text()
)
_FLAGS = {"seqs": "max-num-seqs", "batched": "max-num-batched-tokens", "eager": "enforce-eager"}
_DRIVER_GIB = 0.6
# The starts with two ranks had fuse_allreduce_rms off, and so were without the workspace of it.
_UNFUSED_GIB = {1: 0.0, 2: 13.3 * 64 / 1024}
_EMBEDS = ("qwen3-embedding-0.6b", "bge-m3")


def machine(count: int) -> Hardware:
    """So many H200s, each linked with each."""
    hardware = PROFILES.hardware("h200")
    gpus = tuple(
        hardware.gpus[0].evolve(index=index, uuid=f"{hardware.gpus[0].uuid}-{index}")
        for index in range(count)
    )
    links = tuple(Link(a=a, b=b, nvlinks=18, p2p=True) for a, b in combinations(range(count), 2))
    return hardware.evolve(gpus=gpus, links=links)


@functools.cache
def best_plan(name: str) -> Plan:
    """The best plan for that start; of one rank, or as many as it had."""
    row = MEASURED[name]
    task: Any = "embed" if row["base"] in _EMBEDS else None
    spec = model_from_config(case(row["base"], row["quant"]), task=task)
    args = {flag: row[key] for key, flag in _FLAGS.items() if key in row}
    request = wish(args=args, tensor_parallel=row.get("tp", 1))
    return decide(
        spec, machine(row.get("tp", 1)), ENGINES, request, PROFILES.facts, rules=RULES
    ).plans[0]


@pytest.mark.parametrize("name", MEASURED)
def test_measured_memory_agrees_with_the_plan(name: str) -> None:
    row, plan = MEASURED[name], best_plan(name)
    size = plan.memory
    assert size is not None
    # The log counts rotary tables and buffers for images in addition to the weights; the planner
    # has those elsewhere.
    sees = any(group.kind == "vision" for group in plan.attention)
    assert -0.02 <= row["weights_gib"] - size.weights_bytes / GIB <= (0.5 if sees else 0.22)
    if "kv_gib" in row:
        kv_gib = size.kv_bytes / GIB + _UNFUSED_GIB[row.get("tp", 1)]
        assert -0.4 <= kv_gib - row["kv_gib"] <= 0.15
        assert kv_gib == pytest.approx(row["kv_gib"], rel=0.006)
        tokens = size.full_requests * plan.max_model_len.value * kv_gib / (size.kv_bytes / GIB)
        assert -0.006 <= tokens / row["kv_tokens"] - 1 <= 0.002
    if "used_gib" in row:
        assert (
            size.low / GIB
            < row["used_gib"] - _DRIVER_GIB - row.get("kv_gib", 0.0)
            < size.high / GIB
        )


@pytest.mark.parametrize("name", MEASURED)
def test_the_engine_took_the_runner_and_the_backends_that_were_foreseen(name: str) -> None:
    row, plan = MEASURED[name], best_plan(name)
    task: Any = "embed" if row["base"] in _EMBEDS else None
    spec = model_from_config(case(row["base"], row["quant"]), task=task)
    assert runner_bytes(spec, build(spec), TRAITS["0.26.0"]) == row["runner"]
    assert row["backend"] in {row.backend for row in plan.attention}
    assert set(row.get("kernels", ())) <= {kernel.kernel for kernel in plan.kernels}


def test_cuda_has_less_than_nvml_says() -> None:
    card = PROFILES.hardware("h200").gpus[0]
    assert 640_000_000 < driver_bytes(card) < 650_000_000
    busy = card.evolve(free_bytes=GIB, processes=(GpuProcess(pid=1, used_bytes=100 * GIB),))
    assert driver_bytes(busy) == 640 * 1024**2
    assert driver_bytes(PROFILES.hardware("gb10").gpus[0]) == 0


def cache_of(built: BuiltModel, tp: int, dtype: str = "bfloat16") -> CacheLayout:
    return plan_cache_layout(
        built.attention, Rank(tp=tp, dtype=dtype, capability="8.6"), 16, frozenset()
    )


def memory_of(
    spec: ModelSpec, tp: int = 1, budget: int = 24 * GIB, device: str = "cuda", **more: Any
) -> Memory:
    model = build(spec)
    load = Workload(device, Rank(tp=tp), 2048, 256, graphs=True)
    return rank_memory(
        spec, model, cache_of(model, tp), load,
        weights_bytes=weights_bytes(model, Rank(tp=tp)) or 0,
        device_bytes=24 * GIB, budget_bytes=budget, **more,
    )  # fmt: skip


def test_the_table_of_positions_is_loaded_with_the_weights() -> None:
    whole = memory_of(published_model("llama-3.1-8b"))
    least = memory_of(published_model("llama-3.1-8b", max_position_embeddings=1))
    longer = 131071 * 128 * 2
    assert whole.overhead_bytes - least.overhead_bytes == longer
    assert (whole.loaded_bytes or 0) - (least.loaded_bytes or 0) == longer
    assert whole.weights_bytes == least.weights_bytes


def test_positions_of_videos_have_a_table_of_four_times_the_length() -> None:
    size = memory_of(published_model("qwen3-vl-8b"))
    assert size.loaded_bytes == size.weights_bytes + 4 * 262144 * 128 * 2


def test_the_rest_of_the_budget_is_kv_cache() -> None:
    size = memory_of(published_model("llama-3.1-8b"))
    used_bytes = size.weights_bytes + size.activation_bytes + size.graph_bytes + size.overhead_bytes
    assert size.kv_bytes == 24 * GIB - used_bytes
    assert size.kv_tokens == size.kv_bytes // size.kv_bytes_per_token
    assert size.weights_bytes < size.low < used_bytes < size.high
    assert memory_of(published_model("llama-3.1-8b"), budget=8 * GIB).kv_bytes == 0
    assert memory_of(published_model("llama-3.1-8b"), tp=2).weights_bytes < size.weights_bytes


def test_versions_that_capture_graphs_beside_their_budget_have_that_much_more_cache() -> None:
    spec = published_model("llama-3.1-8b")
    within, graphs_outside = memory_of(spec), memory_of(spec, graphs_in_budget=False)
    assert graphs_outside.kv_bytes - within.kv_bytes == within.graph_bytes > 0


def test_an_encoder_keeps_no_kv_cache() -> None:
    shapes = tensors({"embeddings.word_embeddings.weight": (30522, 768)})
    fields = {"architectures": ["OtherModel"], "model_type": "distilbert", "hidden_size": 768}
    fields |= {"num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 30522}
    spec = model_from_config(fields, source="b", tensors=shapes)
    size = memory_of(spec)
    assert (size.kv_bytes, size.kv_bytes_per_token, size.kv_tokens) == (0, 0, 0)


def test_a_family_that_is_not_known_has_a_wider_band() -> None:
    shapes = tensors({"model.layers.0.self_attn.q_proj.weight": (4096, 4096)})
    fields = {
        "architectures": ["OtherForCausalLM"],
        "model_type": "other",
        "hidden_size": 4096,
        "num_attention_heads": 32,
    }
    spec = model_from_config(
        {**fields, "num_hidden_layers": 1, "vocab_size": 1024}, source="o", tensors=shapes
    )
    model = build(spec)
    assert not model.is_known
    narrow = rank_memory(
        spec, BuiltModel((), model.other_tensors, model.attention), cache_of(model, 1),
        Workload("cuda", Rank(), 2048, 256, graphs=True),
        weights_bytes=GIB, device_bytes=24 * GIB, budget_bytes=24 * GIB,
    )  # fmt: skip
    wide = rank_memory(
        spec, model, cache_of(model, 1), Workload("cuda", Rank(), 2048, 256, graphs=True),
        weights_bytes=GIB, device_bytes=24 * GIB, budget_bytes=24 * GIB,
    )  # fmt: skip
    assert wide.high - wide.low > narrow.high - narrow.low


@given(
    CONFIGS,
    st.none() | TENSORS,
    st.integers(1, 8),
    st.sampled_from(["bfloat16", "float32"]),
    st.integers(0, 10**13),
)
def test_no_model_that_was_read_breaks_the_arithmetic(
    fields: dict[str, Any], headers: dict[str, Any] | None, tp: int, dtype: str, kv_bytes: int
) -> None:
    try:
        spec = model_from_config(fields, tensors=headers)
        model = build(spec)
    except BadModel:
        return
    weights = weights_bytes(model, Rank(tp=tp, dtype=dtype))
    assert weights is None or weights >= 0
    assert (
        activation_bytes(
            spec, model, Workload("cuda", Rank(tp=tp, dtype=dtype), 2048, 256, graphs=False)
        )
        > 0
    )
    kv_cache = cache_of(model, tp, dtype)
    assert kv_cache.bytes_per_token >= 0
    length = kv_cache.largest(kv_bytes, 2048, spec.max_position)
    assert 0 <= length <= spec.max_position
    assert length == 0 or kv_cache.bytes_for(length, 2048) <= kv_bytes
    for device in ("cuda", "cpu"):
        size = memory_of(spec, tp, kv_bytes, device)
        assert 0 <= size.low <= size.high


def test_ranks_that_fuse_their_all_reduces_keep_a_workspace() -> None:
    spec = published_model("llama-3.1-8b")
    model = build(spec)

    def overhead(tp: int, capability: str, **changes: Any) -> float:
        load = Workload(
            "cuda",
            Rank(tp=tp, capability=capability),
            **{"batched_tokens": 8192, "seqs": 256, "graphs": True, **changes},
        )
        size = rank_memory(
            spec,
            model,
            cache_of(model, tp),
            load,
            weights_bytes=GIB,
            device_bytes=80 * GIB,
            budget_bytes=70 * GIB,
        )
        return size.overhead_bytes / GIB

    # Two H200 on 2026-11-22: 1.04 GiB beyond torch with it; 0.21 were planned.
    assert overhead(2, "9.0") == pytest.approx(1.04, abs=0.02)
    assert overhead(2, "8.6") == overhead(2, "9.0", graphs=False) == pytest.approx(0.21, abs=0.01)
    assert overhead(4, "9.0") < 0.25


def test_graphs_beside_the_budget_are_as_large_as_captured_ones() -> None:
    row, plan = MEASURED["llama-3.1-8b"], best_plan("llama-3.1-8b")
    assert plan.memory.graph_bytes / GIB == pytest.approx(row["graphs_gib"], abs=0.03)
    assert plan.memory.promised_bytes - plan.memory.budget_bytes > plan.memory.graph_bytes


def test_few_requests_have_few_sizes_of_graphs() -> None:
    """51 of 256 requests and more, as engines say when they capture them; 64 requests of a 1B: 0.15
    GiB of 0.45, as an H200 took."""
    assert [graph_sizes(seqs) for seqs in (1024, 256, 64, 16, 1)] == [51, 51, 19, 7, 2]
    assert graph_sizes(16, query=4) == 19
    spec = published_model("llama-3.2-1b")
    model = build(spec, frozenset())

    def graphs(seqs: int) -> int:
        load = Workload("cuda", Rank(), 2048, seqs, graphs=True, runner=2)
        return rank_memory(
            spec,
            model,
            cache_of(model, 1),
            load,
            weights_bytes=0,
            device_bytes=80 * GIB,
            budget_bytes=70 * GIB,
        ).graph_bytes

    assert 0.15 / 0.45 < graphs(64) / graphs(256) < 0.45


@pytest.mark.parametrize(
    ("version", "name", "runner"),
    [
        ("0.19.1", "qwen3-8b", 1),
        ("0.22.1", "qwen3-8b", 2),
        ("0.22.1", "llama-3.1-8b", 1),
        ("0.23.0", "llama-3.1-8b", 2),
        ("0.24.0", "deepseek-v2-lite", 2),
        ("0.24.0", "gemma-2-9b", 1),
        ("0.25.1", "gemma-2-9b", 2),
        ("0.28.0", "qwen3-30b-a3b", 1),
        ("0.29.0", "qwen3-30b-a3b", 2),
        ("0.33.0", "qwen3.5-9b", 2),
        ("0.33.0", "bge-m3", 2),
    ],
)
def test_each_version_has_its_own_models_of_the_second_runner(
    version: str, name: str, runner: int
) -> None:
    spec = published_model(name, "embed" if name in _EMBEDS else None)
    assert runner_bytes(spec, build(spec), PROFILES.engine(f"vllm=={version}").traits) == runner


def memory_on_card(name: str, version: str, **args: Any) -> Memory:
    """Memory of the best plan on a card of 24 GiB."""
    engines = PROFILES.engines((f"vllm=={version}",), device="cuda")
    plan = decide(
        published_model(name), PROFILES.hardware("3090"), engines,
        wish(args={"max-model-len": 4096, "kv-cache-dtype": "auto"} | args), PROFILES.facts,
        rules=PROFILES.rules(engines),
    ).plans[0]  # fmt: skip
    assert plan.memory is not None
    return plan.memory


def test_the_second_runner_counts_graphs_since_0_29() -> None:
    """Until then it captured them beside its share."""
    old, new = memory_on_card("qwen3-8b", "0.28.0"), memory_on_card("qwen3-8b", "0.29.0")
    assert old.beside_bytes - new.beside_bytes == old.graph_bytes == new.graph_bytes
    rest = [
        size.weights_bytes + size.activation_bytes + size.overhead_bytes + size.kv_bytes
        for size in (old, new)
    ]
    assert rest[0] == old.budget_bytes
    assert rest[1] == new.budget_bytes - new.graph_bytes


def test_images_of_the_profile_run_take_memory() -> None:
    """The first runner always encoded them, the second one since 0.27.1."""
    args = {"gpu-memory-utilization": 0.95, "enforce-eager": True}
    old, new = (memory_on_card("qwen3-vl-8b", version, **args) for version in ("0.26.0", "0.27.1"))
    assert new.activation_bytes - old.activation_bytes > 1.5 * GIB
    limits = json.dumps({"image": 0, "video": 0})
    blind = memory_on_card("qwen3-vl-8b", "0.27.1", **args, **{"limit-mm-per-prompt": limits})
    assert blind.activation_bytes < old.activation_bytes
    assert 0.9 * GIB < new.weights_bytes - blind.weights_bytes < 1.2 * GIB


def test_the_band_begins_where_kernels_are_compiled_already() -> None:
    """A 4090 with vLLM 0.27.1 and Qwen3-8B had 1.18 GiB of activations in its first start, and 0.19
    in the next (a public capture)."""
    size = memory_on_card("qwen3-8b", "0.27.1", **{"gpu-memory-utilization": 0.9})
    assert size.activation_bytes / GIB == pytest.approx(1.18, abs=0.03)
    overhead = size.overhead_bytes // 2
    assert (size.low - size.weights_bytes - overhead) / GIB == pytest.approx(0.19, abs=0.03)


def test_a_model_with_a_tower_has_no_copy_of_its_embedding() -> None:
    """Gemma 4's tower has no attention of vLLM, but its language model is given embeddings too."""
    spec = published_model("gemma-4-31b")
    load = Workload("cuda", Rank(), 2048, 16, graphs=True)
    copy_bytes = spec.vocab * spec.hidden * 2
    assert activation_bytes(spec, build(spec), load) < copy_bytes
    text = published_model("gemma-3-1b")
    assert activation_bytes(text, build(text), load) > text.vocab * text.hidden * 2


def test_layers_that_share_keys_are_in_graphs_too() -> None:
    """Gemma 4 E4B: 18 of its 42 layers keep none of their own."""
    spec = published_model("gemma-4-e4b")
    layer_count = sum(group.layers for group in build(spec).attention if group.kind != "vision")
    assert layer_count == 24
    dense = published_model("llama-3.1-8b")
    ratio = memory_of(spec).graph_bytes / memory_of(dense).graph_bytes
    assert ratio == pytest.approx(42 / 32, rel=0.01)
