"""Starts that share a GPU: their order, their disturbances and the memory that each took."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.controller.decisions.reconcile import attempts_that_count, next_action
from gateway.diagnosis.facts.learn import prove_success
from gateway.domain import Attempt, Cap, Failure
from gateway.domain.units import GIB, MIB
from gateway.planner.starts import (
    MemoryReading,
    PendingStart,
    PlacedEngine,
    StartObstacle,
    bytes_taken,
    cache_bytes,
    disturbances,
    memory_change,
    memory_shortage,
    readings,
    shape,
    start_block,
    undisturbed_attempts,
)
from tests.support.makers import attempt, machine, plan
from tests.unit.controller.decisions.test_reconcile import NOW, replica

LIMIT_S = 1800.0


def holder(name: str, *gpus: str, phase: Any = "loading", **fields: Any) -> PlacedEngine:
    return PlacedEngine(
        name, name.partition("-")[0], frozenset(gpus), fields.pop("shape", name), phase, **fields
    )


def start(
    name: str, *gpus: str, order: int = 1, proven: bool = False, **fields: Any
) -> PendingStart:
    return PendingStart(
        name,
        name.partition("-")[0],
        frozenset(gpus),
        fields.pop("shape", name),
        order,
        proven,
        **fields,
    )


def block_of(
    asking: PendingStart,
    *other_engines: PlacedEngine,
    waiting: tuple[PendingStart, ...] = (),
    now: float = 0.0,
) -> StartObstacle | None:
    return start_block(asking, (asking, *waiting), other_engines, now, LIMIT_S)


def test_engines_start_one_after_the_other_on_one_gpu_and_side_by_side_on_others() -> None:
    asking = start("b", "G1")
    assert block_of(asking) is None
    assert block_of(asking, holder("a", "G0")) is None
    assert block_of(asking, holder("a", "G0", "G1")) == StartObstacle(
        "a", "loads its weights", "G1"
    )
    assert block_of(asking, holder("a", "G1", phase="stopping")) == StartObstacle(
        "a", "is being stopped", "G1"
    )
    assert block_of(asking, holder("a", "G1", phase="capturing_graphs")) is None
    assert block_of(asking, holder("a", "G1", phase="settled")) is None


def test_engines_with_a_sized_cache_start_together_except_beside_a_measurement() -> None:
    asking = start("b", "G0", is_sized=True)
    assert block_of(asking, holder("a", "G0", is_sized=True)) is None
    assert block_of(asking, holder("a", "G0")) == StartObstacle("a", "loads its weights", "G0")
    assert block_of(asking, holder("a", "G0", phase="stopping", is_sized=True)) == StartObstacle(
        "a", "is being stopped", "G0"
    )
    assert block_of(start("c", "G0"), holder("a", "G0", is_sized=True)) == StartObstacle(
        "a", "loads its weights", "G0"
    )
    assert block_of(asking, waiting=(start("d", "G0", order=0, is_sized=True),)) is None
    assert block_of(asking, waiting=(start("d", "G0", order=0),)) == StartObstacle(
        "d", "starts first", "G0"
    )


def test_engines_with_sized_caches_do_not_disturb_each_other() -> None:
    sized_holder = holder("a", "G0", is_sized=True)
    other_holder = holder("b", "G0", is_sized=True)
    measuring = holder("c", "G0")
    assert not [*disturbances((sized_holder,), (sized_holder, other_holder))]
    assert {
        name for name, _ in disturbances((sized_holder, measuring), (sized_holder, measuring))
    } == {"a", "c"}


def test_only_a_plan_with_room_for_others_gives_cache_bytes() -> None:
    lone_plan = plan(replicas=1, tensor_parallel=1, max_context=8192)
    shared_plan = plan(
        replicas=1, tensor_parallel=1, max_context=8192, args={"gpu-memory-utilization": 0.78}
    )
    assert cache_bytes(lone_plan) is None
    count = cache_bytes(shared_plan)
    assert count == shared_plan.memory.kv_bytes - shared_plan.memory.gpu_bytes // 100
    tight = shared_plan.evolve(
        max_model_len=shared_plan.max_model_len.evolve(value=shared_plan.memory.kv_tokens)
    )
    assert cache_bytes(tight) is None, "what is given would hold no whole context"
    assert cache_bytes(shared_plan.evolve(gpus=())) is None
    assert (
        cache_bytes(
            lone_plan.evolve(cap=Cap(bytes=lone_plan.memory.promised_bytes, models=("other",)))
        )
        is not None
    )


def test_a_plan_that_has_served_gets_the_engines_measurement() -> None:
    lone_plan = plan(replicas=1, tensor_parallel=1, max_context=8192)
    memory = lone_plan.memory
    used_bytes = memory.budget_bytes - memory.kv_bytes + 512 * MIB
    served_plan = lone_plan.evolve(
        grade="verified", memory=memory.evolve(measured_bytes=used_bytes)
    )
    count = cache_bytes(served_plan)
    assert count is not None
    assert 0 < memory.budget_bytes - used_bytes - count < 32 * MIB
    assert cache_bytes(served_plan.evolve(grade="predicted")) is None
    assert cache_bytes(lone_plan.evolve(grade="verified")) is None
    whole = served_plan.max_model_len.evolve(value=memory.kv_tokens)
    assert cache_bytes(served_plan.evolve(max_model_len=whole)) is None


def test_the_measurement_of_a_start_that_went_well_is_in_the_next_plan() -> None:
    first_attempt = attempt(plan=plan(max_context=8192))
    kv_bytes = first_attempt.plan.memory.kv_bytes - 300 * MIB
    facts = prove_success(first_attempt, 1.0, kv_bytes)
    second_plan = plan(max_context=8192, facts=facts)
    assert second_plan.fingerprint == first_attempt.fingerprint
    assert second_plan.memory.measured_bytes == first_attempt.plan.memory.budget_bytes - kv_bytes
    count = cache_bytes(second_plan)
    assert count is not None
    assert 0 < kv_bytes - count < 32 * MIB
    need = next(fact for fact in facts if fact.kind == "needs_memory")
    failed_need = need.evolve(grade="failed", value=(need.value or 0) + 1)
    assert plan(max_context=8192, facts=(*facts, failed_need)).memory.measured_bytes is None
    # A start of the same checkpoint with another loader needed less.
    lesser_need = need.evolve(value=(need.value or 0) - 40 * MIB)
    later_plan = plan(max_context=8192, facts=(*facts, lesser_need))
    assert later_plan.memory.measured_bytes == second_plan.memory.measured_bytes


def test_engines_without_a_gpu_wait_for_nobody() -> None:
    assert block_of(start("b"), holder("a"), waiting=(start("c", order=0),)) is None


def test_a_start_that_hangs_holds_nobody_up_for_ever() -> None:
    asking, hanging = start("b", "G0"), holder("a", "G0", phase_since=100.0)
    assert block_of(asking, hanging, now=100.0 + LIMIT_S - 1) is not None
    assert block_of(asking, hanging, now=100.0 + LIMIT_S) is None


def test_the_start_that_waits_longest_goes_first_even_if_it_needs_more_gpus() -> None:
    pair_start, single_start = start("tp2", "G0", "G1", order=5), start("b", "G0", order=6)
    assert block_of(single_start, holder("a", "G1"), waiting=(pair_start,)) == StartObstacle(
        "tp2", "starts first", "G0"
    )
    assert block_of(pair_start, waiting=(single_start,)) is None


def test_a_second_copy_of_an_unproven_plan_waits_for_the_first() -> None:
    second = start("m-r1", "G1", shape="plan")
    words = StartObstacle("m", "is started for the first time with this plan")
    assert block_of(second, holder("m-r0", "G0", shape="plan")) == words
    assert block_of(second, holder("m-r0", "G0", shape="plan", phase="settled")) == words
    assert (
        block_of(second, holder("m-r0", "G0", shape="plan", phase="settled", is_proved=True))
        is None
    )
    assert block_of(second, holder("m-r0", "G0", shape="another plan")) is None
    assert block_of(second, holder("n-r0", "G0", shape="plan")) is None
    assert block_of(second, holder("m-r0", "G0", shape="plan", phase="stopping")) is None
    assert block_of(second.evolve(is_proved=True), holder("m-r0", "G0", shape="plan")) is None


def test_copies_of_a_plan_have_one_shape() -> None:
    plan = attempt().plan
    assert shape(plan) == shape(plan.evolve(gpus=("another",)))
    assert shape(plan) != shape(plan.evolve(argv=("--max-model-len=1",)))


GPUS = st.frozensets(st.sampled_from(["G0", "G1", "G2", "G3"]), min_size=1)


@given(st.lists(GPUS, min_size=1, max_size=12))
def test_all_that_wait_get_their_turn_and_none_meets_another(
    gpu_sets: list[frozenset[str]],
) -> None:
    waiting = [
        PendingStart(f"m{order}", f"m{order}", gpus, "plan", order, is_proved=False)
        for order, gpus in enumerate(gpu_sets)
    ]
    began: list[str] = []
    while waiting:
        loads: list[PlacedEngine] = []
        for pending_start in tuple(waiting):
            if start_block(pending_start, waiting, loads, 0.0, LIMIT_S) is None:
                waiting.remove(pending_start)
                loads.append(
                    PlacedEngine(
                        pending_start.instance,
                        pending_start.model,
                        pending_start.gpus,
                        pending_start.shape,
                        "loading",
                    )
                )
        assert loads, "nobody may start, though nothing loads"
        gpus_in_use = [gpu for load in loads for gpu in load.gpus]
        assert len(gpus_in_use) == len(set(gpus_in_use))
        began += [load.instance for load in loads]
    assert sorted(began) == sorted(f"m{order}" for order in range(len(gpu_sets)))


@pytest.mark.parametrize(
    ("before", "now", "reason"),
    [
        ((), (holder("b", "G0"),), "b loads its weights on the same GPU"),
        (
            (holder("b", "G0"),),
            (holder("b", "G0", phase="settled"),),
            "b made its KV cache on the same GPU",
        ),
        (
            (holder("b", "G0"),),
            (holder("b", "G0", phase="capturing_graphs"),),
            "b captures its graphs on the same GPU",
        ),
        (
            (holder("b", "G0", phase="capturing_graphs"),),
            (holder("b", "G0", phase="settled"),),
            "b made its KV cache on the same GPU",
        ),
        ((holder("b", "G0", phase="settled"),), (), "b came to its end on the same GPU"),
        (
            (holder("b", "G0", phase="settled"),),
            (holder("b", "G0", phase="stopping"),),
            "b is being stopped on the same GPU",
        ),
    ],
)
def test_an_engine_that_starts_or_dies_disturbs_those_on_its_gpus(
    before: tuple[PlacedEngine, ...], now: tuple[PlacedEngine, ...], reason: str
) -> None:
    holders = (holder("a", "G0", "G1"), holder("c", "G1", phase="settled"), holder("d", "G2"))
    disturbances_of_b = [
        disturbance
        for disturbance in disturbances((*holders, *before), (*holders, *now))
        if "b " in disturbance[1]
    ]
    assert disturbances_of_b == [("a", reason)]


def test_an_engine_that_only_serves_disturbs_nobody() -> None:
    serves = holder("b", "G0", phase="settled")
    assert list(disturbances((serves,), (serves, holder("a", "G0", phase="settled")))) == [
        ("b", "a made its KV cache on the same GPU")
    ]
    holders = (serves, holder("a", "G0", phase="settled"))
    assert not list(disturbances(holders, holders))


def test_graphs_disturb_only_engines_that_measure() -> None:
    imports, measures = holder("a", "G0", is_measuring=False), holder("c", "G0")
    warms = holder("b", "G0", phase="capturing_graphs")
    names = {
        name
        for name, reason in disturbances((imports, measures, warms), (imports, measures, warms))
        if "b " in reason
    }
    assert names == {"c"}


def ends(*disturbed: str) -> Iterator[Attempt]:
    for number, reason in enumerate(disturbed):
        failure = Failure(
            kind="gpu_oom",
            phase="load",
            message="it broke",
            proven_subject="nothing",
            disturbed=reason,
        )
        yield attempt(number, "failed", ended_at=NOW - 1, failure=failure)


def test_a_disturbed_start_costs_nothing_until_it_is_always_disturbed() -> None:
    disturbances_once = tuple(ends("b came to its end"))
    assert not [*undisturbed_attempts(disturbances_once)]
    action = next_action(
        replica(history=attempts_that_count(disturbances_once, 0.0, NOW)),
        NOW,
        backoff_s=10,
        backoff_max_s=300,
    )
    assert type(action).__name__ == "MakePlan"
    assert [attempt.id for attempt in undisturbed_attempts(ends("b", "b", "b", "b", "b"))] == [3, 4]
    assert [attempt.id for attempt in undisturbed_attempts(ends("b", "b", "b", "", "b"))] == [3]
    action = next_action(
        replica(history=attempts_that_count(ends("b", "b", "b", "b"), 0.0, NOW)),
        NOW,
        backoff_s=10,
        backoff_max_s=300,
    )
    assert type(action).__name__ == "NoAction"


def read(*gpus: tuple[int, dict[int, int | None] | None]) -> dict[str, MemoryReading]:
    """free: GiB."""
    return {
        f"G{index}": MemoryReading(f"G{index}", index, free * GIB, processes)
        for index, (free, processes) in enumerate(gpus)
    }


def test_a_process_that_was_there_and_takes_or_gives_back_is_named() -> None:
    before = read((40, {7: 10 * GIB, 8: None}), (80, {}))
    assert memory_change(before, read((30, {7: 10 * GIB + 1, 8: GIB, 9: 10 * GIB}), (80, {}))) == ""
    assert (
        memory_change(before, read((50, {8: None}), (80, {})))
        == "process 7 on GPU 0 had 10.00 GiB and has 0.00 GiB"
    )
    assert "has 12.00 GiB" in memory_change(before, read((38, {7: 12 * GIB}), (80, {})))
    assert memory_change(read((40, None)), read((10, None))) == ""


def test_memory_taken_by_one_new_process_is_known() -> None:
    before = read((80, {7: GIB}), (80, {}))
    assert bytes_taken(before, read((40, {7: GIB, 20: 40 * GIB}), (39, {21: 41 * GIB}))) == 41 * GIB
    assert (
        bytes_taken(before, read((40, {7: GIB, 20: 40 * GIB}), (39, {21: GIB, 22: 40 * GIB})))
        is None
    )
    assert bytes_taken(before, read((40, {7: GIB, 20: 40 * GIB}))) is None


def test_a_plan_that_finds_too_little_is_not_started() -> None:
    new_plan = plan()
    new_plan = new_plan.evolve(
        memory=new_plan.memory.evolve(budget_bytes=20 * GIB, beside_bytes=4 * GIB)
    )
    assert memory_shortage(new_plan, read((21, {}), (24, {}))) == ""
    assert memory_shortage(new_plan, {}) == ""
    words = memory_shortage(new_plan, read((20, {}), (24, {})))
    assert words.startswith("GPU 0 has 20.00 GiB free, and the plan takes 20.50 GiB")


def test_shared_memory_is_not_read_as_gpu_memory() -> None:
    machines = {name: machine(name) for name in ("2x3090", "gb10")}
    assert len(readings(machines["2x3090"], [gpu.uuid for gpu in machines["2x3090"].gpus])) == 2
    assert not readings(machines["gb10"], [gpu.uuid for gpu in machines["gb10"].gpus])
