"""When a plan gives the engine a second KV cache in RAM, and why it does not elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import Gpu, Hardware, Plan
from gateway.domain.hardware import Pcie
from gateway.domain.plan import RAM
from gateway.domain.units import GIB
from gateway.engines.common.resources import shm_bytes
from gateway.errors import BadFlag
from gateway.profiles.profiles import Profiles
from tests.conformance.layer_cases import case
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import model_from_config

PROFILES = Profiles()
FLAG = "--kv-offloading-size="
SHARE = {"gpu-memory-utilization": 0.3}


def machine(name: str = "h200", ram_gib: int = 256, **fields: Any) -> Hardware:
    ram = {"ram_total_bytes": ram_gib * GIB, "shm_bytes": ram_gib // 2 * GIB}
    return PROFILES.hardware(name).evolve(**{**ram, **fields})


def machine_with_link(pcie: Pcie) -> Hardware:
    """The machine with such a link of its GPU."""
    hardware = machine()
    gpus: tuple[Gpu, ...] = tuple(gpu.evolve(pcie=pcie) for gpu in hardware.gpus)
    return hardware.evolve(gpus=gpus)


def first_plan(
    hardware: Hardware,
    *,
    model: str = "llama-3.1-8b",
    version: str = "vllm==0.26.0",
    goal: Any = "agents",
    **fields: Any,
) -> Plan:
    """The first plan of a model that takes a part of the GPU, unless `args` say otherwise."""
    engines = PROFILES.engines((version,), device="cuda")
    return decide(
        model_from_config(case(model, "none")),
        hardware,
        engines,
        wish(goal=goal, **{"args": SHARE, **fields}),
        PROFILES.facts,
        rules=PROFILES.rules(engines),
        speed_knowledge=PROFILES.speed_knowledge,
    ).plans[0]


def offloaded_gib(plan: Plan) -> int:
    """By its command line."""
    sizes = [item.removeprefix(FLAG) for item in plan.argv if item.startswith(FLAG)]
    return int(sizes[0]) if sizes else 0


def test_agents_get_a_cache_in_ram_beside_a_small_one_on_the_gpu() -> None:
    plan = first_plan(machine())
    choice = plan.kv_offload_gib
    # Half of 256 GiB without a twentieth for other programs, and 16 for those of the engine.
    assert choice.value == offloaded_gib(plan) == 113
    assert "32,768 tokens that return have their first token after 0.15 s" in choice.reason
    assert "lost 1.4 %" in choice.reason


def test_shared_memory_has_room_for_it() -> None:
    plain, offloading = first_plan(machine(), goal="balanced"), first_plan(machine())
    gained = shm_bytes(offloading) - shm_bytes(plain)
    assert gained == offloading.kv_offload_gib.value * GIB


@pytest.mark.parametrize("goal", ["balanced", "latency", "throughput", "context"])
def test_no_other_goal_has_it(goal: str) -> None:
    plan = first_plan(machine(), goal=goal)
    assert plan.kv_offload_gib.value == offloaded_gib(plan) == 0


@pytest.mark.parametrize(
    ("hardware", "fields", "why"),
    [
        (machine(ram_gib=64), {}, "of RAM for it, hardly more than copies"),
        (
            machine(shm_bytes=GIB // 16),
            {},
            "the machine has 0.00 GiB of shared memory (/dev/shm) for it",
        ),
        (machine(), {"args": {}}, "hardly more than copies of the GPU's"),
        (machine_with_link(Pcie(max_generation=3, max_width=8)), {}, "too little is gained by it"),
        (machine_with_link(Pcie()), {}, "the speed of the GPU or of its link is not known"),
        (machine(), {"max_context": 8192}, "shorter than 32,768 tokens"),
        (machine(), {"model": "gemma-3-1b"}, "only full attention in all layers"),
        (machine(), {"args": {**SHARE, "enable-sleep-mode": True}}, "untested with sleep"),
        (machine("2xh200"), {"tensor_parallel": 2}, "only an engine on one GPU"),
        (machine(), {"version": "sglang==0.5.23", "args": {}}, "has no flag"),
    ],
)
def test_the_others_say_why_not(hardware: Hardware, fields: dict[str, Any], why: str) -> None:
    plan = first_plan(hardware, **fields)
    assert plan.kv_offload_gib.value == offloaded_gib(plan) == 0
    assert why in plan.kv_offload_gib.reason


@pytest.mark.parametrize("goal", ["balanced", "agents"])
@pytest.mark.parametrize("size_gib", [0.5, 24, 24.5])
def test_a_user_may_set_it_in_any_case(goal: str, size_gib: float) -> None:
    plan = first_plan(machine(), goal=goal, args={**SHARE, "kv-offloading-size": size_gib})
    assert (plan.kv_offload_gib.value, plan.kv_offload_gib.source) == (size_gib, "user")
    assert type(plan.kv_offload_gib.value) is type(size_gib)
    assert f"{FLAG}{float(size_gib)}" in plan.argv
    assert plan.offloaded_bytes == size_gib * GIB
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_ram_that_other_engines_were_promised_is_theirs() -> None:
    engines = PROFILES.engines(("vllm==0.26.0",), device="cuda")
    plans = [
        decide(
            model_from_config(case("llama-3.1-8b", "none")),
            machine(),
            engines,
            wish(goal="agents", args=SHARE),
            PROFILES.facts,
            rules=PROFILES.rules(engines),
            speed_knowledge=PROFILES.speed_knowledge,
            promised_bytes=promised_bytes,
        ).plans[0]
        for promised_bytes in ({}, {RAM: 40 * GIB}, {RAM: 200 * GIB})
    ]
    sizes = [plan.offloaded_bytes // GIB for plan in plans]
    # Half of the rest, within the shared memory; at last too little is left.
    assert sizes == [113, 81, 0]


@pytest.mark.parametrize("size", [0, -5, 1e300])
def test_a_size_that_no_machine_has_is_refused(size: float) -> None:
    with pytest.raises(BadFlag, match=r"must be at least 0\.01 and at most 65536"):
        first_plan(machine(), args={**SHARE, "kv-offloading-size": size})
