"""How much RAM and how many processes an engine may have."""

from __future__ import annotations

import pytest

from gateway.domain.value import MAX_BYTES
from gateway.engines.common import resources
from gateway.planner.flags import LaunchInputs, launch_spec
from tests.support.makers import GIB, engine, machine, make_decision, plan
from tests.support.published import published_model


@pytest.mark.parametrize("hardware", ["cpu", "3090", "2x3090", "8xh100", "gb10"])
def test_a_sound_engine_stays_far_below_its_limit(hardware: str) -> None:
    """Everything that it has on its devices, in RAM once more, and its programs."""
    plans = make_decision(hardware, model=published_model("llama-3.2-1b")).plans
    assert plans
    for sound_plan in plans:
        ranks = resources.rank_count(sound_plan)
        prediction = ranks * (sound_plan.memory.high + sound_plan.memory.kv_bytes)
        assert (
            resources.ram_limit_bytes(sound_plan)
            >= prediction + ranks * sound_plan.memory.weights_bytes + 16 * GIB + 8 * GIB * ranks
        )
        assert resources.process_limit(sound_plan) >= 4096 * (ranks + 3)


def test_more_ranks_get_more() -> None:
    single_plan, two = plan("3090"), plan("2x3090", tensor_parallel=2)
    assert (resources.rank_count(single_plan), resources.rank_count(two)) == (1, 2)
    assert resources.process_limit(two) > resources.process_limit(single_plan)
    assert resources.shm_bytes(two) > resources.shm_bytes(single_plan)


@pytest.mark.parametrize(
    "flag",
    [
        "--cpu-offload-gb=10",
        "--swap-space=64",
        "--hicache-size=9",
        "--hicache-ratio=2",
        "--mm-processor-cache-gb=50",
    ],
)
def test_ram_that_a_plan_does_not_know_is_left_to_the_machine(flag: str) -> None:
    assert resources.ram_limit_bytes(plan().evolve(argv=(*plan().argv, flag))) == MAX_BYTES


def test_a_model_on_a_cpu_has_its_memory_in_ram_alone() -> None:
    cpu_plan = plan("cpu", model=published_model("llama-3.2-1b"))
    assert resources.ram_limit_bytes(cpu_plan) < 8 * machine("cpu").ram_total_bytes


def test_only_a_container_gets_folders_to_write() -> None:
    own_engine = engine(scratch=("/tmp",))
    for environment, folders in ((None, ("/tmp",)), ("/env", None)):
        new_launch_spec = launch_spec(
            plan(),
            own_engine,
            LaunchInputs("/m", environment=environment),
            name="n",
            model="m",
            attempt=1,
            port=1,
        )
        assert new_launch_spec.scratch == folders
        assert new_launch_spec.memory_bytes == resources.ram_limit_bytes(plan())
        assert new_launch_spec.pids == resources.process_limit(plan())


def test_plans_for_one_kind_of_gpu_share_compiled_kernels_without_remote_code() -> None:
    first_plan = plan("2x3090")
    second = plan("2x3090").evolve(model=plan().model.evolve(source="/models/other"))
    caching = engine(caches={"VLLM_CACHE_ROOT": "vllm"})
    assert resources.compile_cache_name(first_plan, engine(), remote_code=False) == ""
    assert resources.compile_cache_name(
        first_plan, caching, remote_code=False
    ) == resources.compile_cache_name(second, caching, remote_code=False)
    other_flags = {
        resources.compile_cache_name(first_plan, caching, remote_code=False),
        resources.compile_cache_name(first_plan, caching, remote_code=True),
        resources.compile_cache_name(second, caching, remote_code=True),
        resources.compile_cache_name(plan("8xh100"), caching, remote_code=False),
    }
    assert len(other_flags) == 4


def test_the_page_cache_leaves_memory_of_programs_and_engine() -> None:
    single_plan, two = plan("3090"), plan("2x3090", tensor_parallel=2)
    hardware = machine("2x3090").evolve(ram_total_bytes=64 * GIB, ram_available_bytes=40 * GIB)
    free_ram = resources.reserved_ram_bytes(64 * GIB)
    assert resources.page_cache_bytes(single_plan, hardware) == 40 * GIB - free_ram - 2 * GIB
    assert resources.page_cache_bytes(two, hardware) == 40 * GIB - free_ram - 4 * GIB
    assert (
        resources.page_cache_bytes(single_plan, hardware.evolve(ram_available_bytes=3 * GIB)) == 0
    )


@pytest.mark.parametrize("hardware", ["cpu", "gb10"])
def test_an_engine_in_ram_keeps_all_promised_bytes(hardware: str) -> None:
    hardware_value = machine(hardware)
    plan = make_decision(hardware, model=published_model("llama-3.2-1b")).plans[0]
    free = hardware_value.evolve(ram_available_bytes=plan.memory.promised_bytes + 2 * GIB)
    assert resources.page_cache_bytes(plan, free) == 0
    plenty = resources.page_cache_bytes(plan, hardware_value.evolve(ram_available_bytes=10**13))
    assert plenty <= 10**13 - plan.memory.promised_bytes
