"""The sizes of a candidate, above all beside a host: memory that engines take, and leave."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import Decision, Hardware, Plan, Wish
from gateway.domain.units import GIB
from gateway.engines.common.planning_input import host_reserve_bytes
from gateway.profiles.profiles import Profiles
from tests.support.paths import MODELS
from tests.support.planning import decide
from tests.support.published import published_model
from tests.support.versions import VLLM_REF

PROFILES = Profiles()
ENGINES = {ref: PROFILES.engine(ref) for ref in PROFILES.engine_files}
RULES = PROFILES.rules(ENGINES.values())
SGLANG_REF = "sglang==0.5.23"
NAMES = sorted(path.stem for path in MODELS.glob("*.json"))
GB10 = PROFILES.hardware("gb10")
CACHE = "--kv-cache-memory-bytes="
SHARE = "--gpu-memory-utilization="


def unified_machine(total_gib: float, free_gib: float, capability: str, **fields: Any) -> Hardware:
    """A machine whose GPU has the host's memory."""
    total, free = round(total_gib * GIB), round(free_gib * GIB)
    gpu = GB10.gpus[0].evolve(total_bytes=total, free_bytes=free, capability=capability, **fields)
    return GB10.evolve(gpus=(gpu,), ram_total_bytes=total, ram_available_bytes=free)


# Free bytes of a fresh boot that owners report: github.com/MiaAI-Lab, 101.3 to 102.2 of 121.69 GiB.
MACHINES = {
    "gb10": GB10,
    "gb10 with a desktop": unified_machine(121.69, 101.8, "12.1"),
    "gb10 beside programs": unified_machine(121.69, 60, "12.1"),
    "Thor": unified_machine(122.8, 114, "11.0"),
    "AGX Orin 64": unified_machine(61.4, 56, "8.7"),
    "Orin NX 16": unified_machine(15.3, 12.5, "8.7"),
    "Orin Nano 8": unified_machine(7.4, 5.6, "8.7"),
}


def make_decision(name: str, hardware: Hardware, engine: str = VLLM_REF, **wish: Any) -> Decision:
    spec = published_model(name)
    request = Wish.model_validate({"name": "m", "source": name, **wish})
    # Their images are not made for every processor; memory does not ask for it.
    known_engine = ENGINES[engine].evolve(machines=())
    return decide(spec, hardware, [known_engine], request, rules=RULES)


def flag(plan: Plan, name: str) -> str | None:
    return next((item.removeprefix(name) for item in plan.argv if item.startswith(name)), None)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("engine", [VLLM_REF, SGLANG_REF])
def test_the_host_keeps_its_part_of_memory_beside_any_plan(machine: str, engine: str) -> None:
    hardware, count = MACHINES[machine], 0
    gpu = hardware.gpus[0]
    assert gpu.free_bytes is not None
    assert gpu.total_bytes is not None
    for name in NAMES:
        for plan in make_decision(name, hardware, engine).plans:
            count += 1
            memory = plan.memory
            host_bytes = memory.promised_bytes + host_reserve_bytes(gpu)
            assert host_bytes <= gpu.free_bytes <= gpu.total_bytes, (name, plan.argv)
            # Pages of a file are added to the weights during loading, when there is no KV cache
            # yet.
            pages = min(memory.weights_bytes, 5 * GIB)
            loads = memory.weights_bytes + memory.beside_bytes + pages
            warnings = [warning for warning in plan.warnings if "stay for the host" in warning]
            assert len(warnings) == 1
            assert (loads > gpu.free_bytes) == ("read several times" in warnings[0]), (
                name,
                warnings,
            )
            size = flag(plan, CACHE) or flag(plan, "--max-total-tokens=")
            assert size or not memory.kv_bytes_per_token, (name, plan.argv)
    assert count or (engine, machine) == (SGLANG_REF, "Orin Nano 8")


def test_sglang_takes_its_share_of_free_memory() -> None:
    """The fraction refers to all that is free, with the host's part in it."""
    plan = make_decision("llama-3.1-8b", GB10, SGLANG_REF).plans[0]
    share, gpu = flag(plan, "--mem-fraction-static="), GB10.gpus[0]
    assert share is not None
    assert gpu.free_bytes is not None
    static = float(share) * (gpu.free_bytes - plan.memory.overhead_bytes)
    used_bytes = static + plan.memory.overhead_bytes + plan.memory.activation_bytes
    assert used_bytes <= gpu.free_bytes - host_reserve_bytes(gpu)
    assert static >= plan.memory.weights_bytes + plan.memory.kv_bytes


def test_no_cache_is_taken_that_the_wish_does_not_need() -> None:
    small_plan = make_decision("llama-3.1-8b", GB10).plans[0]
    large_plan = make_decision("llama-3.1-8b", GB10, goal="throughput", concurrency=256).plans[0]
    whole = make_decision("llama-3.1-8b", GB10, goal="context").plans[0]
    assert small_plan.memory.kv_tokens < 2 * 4 * 32768
    assert large_plan.memory.kv_tokens >= 256 * 1280
    assert (
        small_plan.memory.budget_bytes < large_plan.memory.budget_bytes < whole.memory.budget_bytes
    )
    # A GPU with memory of its own has no other use for it.
    lone_plan = make_decision("llama-3.1-8b", PROFILES.hardware("rtx-pro-6000")).plans[0]
    assert lone_plan.memory.budget_bytes > small_plan.memory.budget_bytes
    assert flag(lone_plan, CACHE) is None


def test_the_setting_sets_the_hosts_part_of_memory() -> None:
    machines = {
        gib: unified_machine(121.69, 101.8, "12.1", host_bytes=gib * GIB) for gib in (0, 40)
    }
    most = {
        gib: make_decision("llama-3.1-8b", machine, goal="context").plans[0].memory.promised_bytes
        for gib, machine in machines.items()
    }
    assert most[40] + 40 * GIB <= round(101.8 * GIB)
    assert most[0] > most[40]


def test_a_share_of_the_user_wins_and_the_plan_names_its_cost() -> None:
    plan = make_decision("llama-3.1-8b", GB10, args={"gpu-memory-utilization": 0.9}).plans[0]
    assert flag(plan, SHARE) == "0.9"
    assert flag(plan, CACHE) is None
    assert any("FITSERVE_HOST_BYTES" in warning and "hang" in warning for warning in plan.warnings)


@pytest.mark.parametrize("machine", ["gb10", "h200"])
def test_a_plan_takes_the_cache_size_of_the_user(machine: str) -> None:
    size = 8 * GIB
    args = {"kv-cache-memory-bytes": size}
    plan = make_decision("llama-3.1-8b", PROFILES.hardware(machine), args=args).plans[0]
    assert plan.memory.kv_bytes == size
    assert plan.max_model_len.value <= plan.memory.kv_tokens
    share = flag(plan, SHARE)
    assert share is not None
    assert float(share) * plan.memory.gpu_bytes >= plan.memory.budget_bytes * 0.98
    too_much = make_decision(
        "llama-3.1-8b", PROFILES.hardware(machine), args={"kv-cache-memory-bytes": 300 * GIB}
    )
    assert not too_much.plans
    assert too_much.rejected[0].verdict == "no_memory"


@pytest.mark.parametrize(("tokens", "planned"), [("8k", 8192), (1024, 1024), ("32k", 32768)])
def test_a_plan_has_the_requested_context(tokens: object, planned: int) -> None:
    machine = PROFILES.hardware("3090")
    best = make_decision("llama-3.1-8b", machine, context=tokens).plans[0]
    assert best.max_model_len.value == planned
    assert flag(best, "--max-model-len=") == str(planned)


def test_a_context_beyond_the_machine_or_the_model_is_refused_with_the_limit() -> None:
    machine = PROFILES.hardware("3090")
    whole = make_decision("llama-3.1-8b", machine, goal="context").plans[0].max_model_len.value
    assert whole < 131072
    plain = {"kv-cache-dtype": "auto"}
    decision = make_decision("llama-3.1-8b", machine, context="128k", args=plain)
    assert not decision.plans
    assert any(
        "a context of 131072 tokens was asked for" in reason
        for rejection in decision.rejected
        for reason in rejection.reasons
    )
    beyond = make_decision("llama-3.1-8b", machine, context="1m")
    assert not beyond.plans
    assert "the model's own limit is 131072" in beyond.rejected[0].reasons[0]
    # The advanced pair leaves the size to the planner.
    between = make_decision("llama-3.1-8b", machine, min_context=4096, max_context="1m").plans[0]
    assert between.max_model_len.value > 32768


def test_a_share_of_unified_memory_is_warned_of() -> None:
    """Two GB10 had 22.5 GiB of cache where 38 were forecast: host programs count as the engine's
    (github.com/eugr/spark-vllm-docker/issues/396; MemorySnapshot in vllm/utils/mem_utils.py)."""
    words = "the engine counts what other programs take while it starts as its own"
    shares = (
        make_decision("llama-3.1-8b", GB10, args=args).plans[0]
        for args in ({"gpu-memory-utilization": 0.6}, {})
    )
    assert [any(words in warning for warning in plan.warnings) for plan in shares] == [True, False]
