"""Tensor parallel sizes that the engine refuses, and which GPUs form a group."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import Gpu, Hardware, Link, ModelSpec
from gateway.engines.common.layers.build import build
from gateway.engines.common.planning_input import PlanningInput, available_bytes
from gateway.errors import BadModel
from gateway.planner import parallel
from gateway.planner.parallel import GpuGroups, layers_per_stage
from tests.support.makers import wish
from tests.support.published import (
    CONFIGS,
    TENSORS,
    config,
    model_from_config,
    published_model,
    tensors,
)

GIB = 1024**3
# The sizes from 1 to 8 at which vLLM's own model classes can be built; versions 0.18.0, 0.19.1,
# 0.26.0 and 0.33.0 agree.
SIZES: dict[str, set[int]] = {
    "llama-3.1-8b": {1, 2, 4, 8},
    "llama-3.2-1b": {1, 2, 4, 8},
    "mistral-7b-v0.1": {1, 2, 4, 8},
    "mistral-7b-v0.3": {1, 2, 4, 8},
    "qwen2.5-7b": {1, 2, 4},
    "qwen2.5-1.5b": {1, 2, 4},
    "qwen3-8b": {1, 2, 4, 8},
    "qwen3-30b-a3b": {1, 2, 4, 8},
    "mixtral-8x7b": {1, 2, 4, 8},
    "granite-3.1-2b": {1, 2, 4, 8},
    "qwen1.5-moe-a2.7b": {1, 2, 4, 8},
}
# Shapes of which only one thing refuses, in the same way: base, changes, allowed numbers, and the
# reason for three GPUs.
TWELVE = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "intermediate_size": 3072,
}
PROBES: list[tuple[str, dict[str, Any], set[int], str | None]] = [
    ("llama-3.1-8b", {**TWELVE, "vocab_size": 32000}, {1, 2, 4}, "vocabulary (32000 rows"),
    ("llama-3.1-8b", {**TWELVE, "vocab_size": 32064}, {1, 2, 3, 4, 6}, None),
    ("llama-3.1-8b", {**TWELVE, "vocab_size": 32001}, {1, 2, 3, 4, 6}, None),
    ("llama-3.1-8b", {**TWELVE, "vocab_size": 32064, "intermediate_size": 3074}, {1, 2},
        "3074 inputs"),
    ("llama-3.1-8b", {**TWELVE, "vocab_size": 32064, "num_key_value_heads": 4}, {1, 2, 4},
        "4 KV heads"),
    (
        "mixtral-8x7b",
        {"num_attention_heads": 36, "num_key_value_heads": 12, "hidden_size": 4608,
            "vocab_size": 32064, "intermediate_size": 14332},
        {1, 2, 4},
        "w13 (4608 inputs, 28664 outputs)",
    ),
    ("mixtral-8x7b", {"num_local_experts": 4}, {1, 2, 4, 8}, "attention heads"),
]  # fmt: skip


def parallel_refusal(spec: ModelSpec, tp: int) -> str | None:
    problem = parallel.parallel_refusal(spec, build(spec), tp)
    return problem[0] if problem else None


@pytest.mark.parametrize("name", SIZES)
def test_legal_sizes_equal_those_of_the_engine(name: str) -> None:
    assert {
        tp for tp in range(1, 9) if parallel_refusal(published_model(name), tp) is None
    } == SIZES[name]


@pytest.mark.parametrize(("name", "changes", "sizes", "reason"), PROBES)
def test_each_refusal_equals_that_of_the_engine(
    name: str, changes: dict[str, Any], sizes: set[int], reason: str | None
) -> None:
    spec = published_model(name, None, **changes)
    assert {tp for tp in range(1, 9) if parallel_refusal(spec, tp) is None} == sizes
    assert (
        reason in (parallel_refusal(spec, 3) or "") if reason else parallel_refusal(spec, 3) is None
    )


def test_experts_stored_as_one_tensor_divide_by_their_size() -> None:
    fused_tensors = tensors({"model.layers.0.mlp.experts.gate_up_proj": (4, 4096, 28672)})
    fields = config("mixtral-8x7b", model_type="other", intermediate_size=14338)
    spec = model_from_config(fields, tensors=fused_tensors)
    assert parallel_refusal(spec, 2) is None
    assert "14338" in (parallel_refusal(spec, 4) or "")


@given(CONFIGS, st.none() | TENSORS, st.integers(1, 8))
def test_every_model_that_was_read_has_an_answer_for_every_size(
    fields: dict[str, Any], headers: Any, tp: int
) -> None:
    try:
        spec = model_from_config(fields, tensors=headers)
    except BadModel:
        return
    reason = parallel_refusal(spec, tp)
    assert reason is None or (tp > 1 and reason)


def host(free: list[int], links: list[tuple[int, int, int]] = [], **fields: Any) -> Hardware:  # noqa: B006
    gpus = [
        Gpu(
            index=n, uuid=f"GPU-{n}", name="A", total_bytes=24 * GIB, free_bytes=gib * GIB, **fields
        )
        for n, gib in enumerate(free)
    ]
    pairs = [Link(a=a, b=b, nvlinks=count) for a, b, count in links]
    return Hardware(
        arch="x86_64",
        cpu_cores=8,
        ram_total_bytes=64 * GIB,
        ram_available_bytes=64 * GIB,
        gpus=gpus,
        links=pairs,
    )


def unproven(hardware: Hardware, gpus: slice) -> tuple[int, int] | None:
    planning_input = PlanningInput(published_model("llama-3.1-8b"), hardware, wish())
    return planning_input.unlinked_pair(hardware.gpus[gpus])


def choose_devices(
    hardware: Hardware, tp: int, promised_bytes: dict[str, int] | None = None
) -> list[int] | None:
    group = GpuGroups(hardware, promised_bytes or {}).best_group(tp)
    return None if group is None else [gpu.index for gpu in group]


def test_promised_memory_and_that_of_others_is_not_available() -> None:
    gpu = host([20]).gpus[0]
    assert available_bytes(gpu, {}) == 20 * GIB
    # The driver keeps up to a fiftieth of the 24 GiB, which nobody gets.
    assert available_bytes(gpu, {"GPU-0": 10 * GIB}) == 14 * GIB - 24 * GIB // 50
    assert available_bytes(gpu, {"GPU-0": 30 * GIB}) == 0
    assert (
        available_bytes(gpu.evolve(free_bytes=None), {"GPU-0": 10 * GIB})
        == 14 * GIB - 24 * GIB // 50
    )
    assert available_bytes(gpu.evolve(total_bytes=None, free_bytes=None), {}) == 0


def test_the_emptiest_gpu_is_taken_and_of_equals_the_first() -> None:
    assert choose_devices(host([20, 24, 24]), 1) == [1]
    assert choose_devices(host([24, 24, 24]), 2) == [0, 1]
    assert choose_devices(host([24, 24]), 1, {"GPU-0": GIB}) == [1]


def test_linked_gpus_are_taken_together() -> None:
    assert choose_devices(host([24, 24, 24, 24], [(0, 3, 4), (1, 2, 4)]), 2) == [0, 3]
    assert choose_devices(host([22, 24, 24, 22], [(0, 3, 4)]), 2) == [0, 3]


def test_links_between_full_gpus_are_worth_less_than_memory() -> None:
    assert choose_devices(host([2, 24, 24, 2], [(0, 3, 4)]), 2) == [1, 2]


def test_gpus_of_different_kinds_never_share_a_model() -> None:
    mixed_machine = host([24, 24])
    mixed_machine = mixed_machine.evolve(
        gpus=(mixed_machine.gpus[0], mixed_machine.gpus[1].evolve(name="B"))
    )
    assert choose_devices(mixed_machine, 2) is None
    assert choose_devices(mixed_machine, 1) == [0]
    assert choose_devices(host([]), 1) is None


def test_grouping_of_many_gpus_needs_few_steps() -> None:
    large_host = host([24] * 64, [(a, b, 18) for a in range(64) for b in range(a)])
    assert choose_devices(large_host, 8) == list(range(8))
    assert choose_devices(large_host, 16) == list(range(16))
    assert choose_devices(large_host, 64) == list(range(64))


@given(
    free=st.lists(st.integers(1, 24), min_size=2, max_size=7),
    size=st.integers(1, 4),
    nvlinks=st.sampled_from([0, 4]),
)
def test_the_emptiest_of_equally_linked_gpus_are_taken(
    free: list[int], size: int, nvlinks: int
) -> None:
    pairs = [(a, b, nvlinks) for a in range(len(free)) for b in range(a)]
    groups = list(combinations(range(len(free)), size))
    best = max(
        groups,
        key=lambda group: (min(free[gpu] for gpu in group), [-gpu for gpu in group]),
        default=None,
    )
    assert choose_devices(host(free, pairs), size) == (None if best is None else list(best))


def test_pairs_without_nvlink_or_proven_peer_access_are_named() -> None:
    three = host([24, 24, 24], [(0, 1, 4)])
    links = (*three.links, Link(a=1, b=2, p2p=True))
    three = three.evolve(links=links)
    assert unproven(three, slice(0, 2)) is None
    assert unproven(three, slice(1, 3)) is None
    assert unproven(three, slice(0, 3)) == (0, 2)
    assert unproven(three, slice(0, 1)) is None
    machine_without_p2p = three.evolve(links=(Link(a=0, b=1, nvlinks=0, p2p=False),))
    assert unproven(machine_without_p2p, slice(0, 2)) == (0, 1)


def test_layers_are_dealt_by_shares_as_far_as_they_fit() -> None:
    assert layers_per_stage(64, (2, 1), (64, 64)) == (43, 21)
    assert layers_per_stage(64, (2, 1), (40, 64)) == (40, 24)
    assert layers_per_stage(65, (1, 1), (64, 64)) == (33, 32)
    # Every stage has one, and none has more than there is room for.
    assert layers_per_stage(3, (100, 1, 1), (9, 9, 9)) == (1, 1, 1)
    assert layers_per_stage(64, (2, 1), (40, 20)) is None
    assert layers_per_stage(1, (2, 1), (40, 20)) is None
