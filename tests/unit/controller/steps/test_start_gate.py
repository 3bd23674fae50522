"""The order of starts that measure memory on the same GPUs, and the disturbances among them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest

from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.steps.start_gate import StartGate, WithdrawnError
from gateway.domain import Attempt, Failure, GpuProcess, Hardware, Instance
from gateway.domain.units import GIB
from gateway.planner.starts import EnginePhase, PlacedEngine, shape
from tests.support.makers import attempt, machine, plan, wish
from tests.support.patience import wait_until

pytestmark = pytest.mark.anyio

UUID = machine().gpus[1].uuid
PLAN = plan().evolve(gpus=(UUID,))


class ObservedStarts:
    """The engines that a test pretends."""

    def __init__(self) -> None:
        self.engines: dict[int, tuple[Attempt, EnginePhase]] = {}
        self.failed: Failure | None = None

    def enter_phase(self, attempt: Attempt, phase: EnginePhase) -> None:
        self.engines[attempt.id] = attempt, phase

    def holders(
        self, _running: Collection[str], begun_names: set[str], now: float
    ) -> list[PlacedEngine]:
        holders = [
            self._holder(start_of_engine, phase, now)
            for start_of_engine, phase in self.engines.values()
        ]
        names = {holder.instance for holder in holders}
        return holders + [
            self._holder(start(9), "loading", now)
            for name in begun_names - names
            if name == start(9).instance_name
        ]

    def copy_failure(self, _attempt: Attempt) -> Failure | None:
        return self.failed

    def _holder(self, attempt: Attempt, phase: EnginePhase, now: float) -> PlacedEngine:
        return PlacedEngine(
            attempt.instance_name,
            attempt.model,
            frozenset(attempt.plan.gpus),
            shape(attempt.plan),
            phase,
            now,
        )


def start(number: int, model: str = "new") -> Attempt:
    new_attempt: Attempt = attempt(number, plan=PLAN, model=model)
    return new_attempt


async def hardware() -> Hardware:
    return machine()


def gate(engines: ObservedStarts) -> StartGate:
    return StartGate(engines, hardware, 1800.0)


async def take_turn(
    start_gate: StartGate, attempt: Attempt, words: list[str]
) -> asyncio.Task[int | None]:
    task = asyncio.create_task(start_gate.wait_for_turn(attempt, words.append))
    for _ in range(5):
        await asyncio.sleep(0)
    return task


async def test_a_start_waits_until_its_neighbour_has_its_kv_cache_and_says_so() -> None:
    observations, words = ObservedStarts(), list[str]()
    start_gate, old_start, new_start = gate(observations), start(1, "old"), start(9)
    observations.enter_phase(old_start, "loading")
    task = await take_turn(start_gate, new_start, words)
    assert not task.done(), "nobody has looked yet"
    start_gate.record_engines([])
    await wait_until("the start waits", lambda: words)
    assert words == ["waits for old on GPU 1, which loads its weights"]
    assert start_gate.is_waiting(new_start)
    observations.enter_phase(old_start, "capturing_graphs")
    start_gate.record_engines([])
    await task
    assert not start_gate.is_waiting(new_start)


async def test_an_admitted_start_holds_up_the_next_before_the_host_lists_it() -> None:
    observations, words = ObservedStarts(), list[str]()
    start_gate = gate(observations)
    start_gate.record_engines([])
    await start_gate.wait_for_turn(start(9), words.append)
    task = await take_turn(start_gate, start(10, "next"), words)
    start_gate.record_engines([])
    await wait_until("the next start waits", lambda: words)
    assert not task.done()
    assert words[-1].startswith("waits for new on GPU 1")
    task.cancel()


async def test_a_disturbed_start_is_known_until_the_next_start() -> None:
    observations = ObservedStarts()
    start_gate, old_start, new_start = gate(observations), start(1, "old"), start(9)
    observations.enter_phase(old_start, "settled")
    start_gate.record_engines([])
    await start_gate.wait_for_turn(new_start, lambda _: None)
    observations.enter_phase(new_start, "loading")
    start_gate.record_engines([])
    assert start_gate.disturbance(new_start) == ""
    del observations.engines[old_start.id]
    start_gate.record_engines([])
    assert start_gate.disturbance(new_start) == "old came to its end on the same GPU"
    assert start_gate.disturbance(start(11)) == ""


async def test_engines_that_run_when_the_gateway_starts_disturbed_nobody() -> None:
    observations = ObservedStarts()
    start_gate, old_start, new_start = gate(observations), start(1, "old"), start(9)
    observations.enter_phase(old_start, "settled")
    observations.enter_phase(new_start, "loading")
    start_gate.record_engines(
        [Instance(name="x", model="m", attempt=1, fingerprint="", state="running")]
    )
    assert start_gate.disturbance(new_start) == ""


async def test_a_plan_that_a_copy_has_shown_to_fail_is_not_started() -> None:
    observations, words = ObservedStarts(), list[str]()
    start_gate = gate(observations)
    observations.enter_phase(start(1, "old"), "loading")
    start_gate.record_engines([])
    task = await take_turn(start_gate, start(9), words)
    observations.failed = Failure(kind="no_kernel", phase="load", message="No kernel takes it.")
    start_gate.record_engines([])
    with pytest.raises(WithdrawnError, match="failed first: No kernel takes it"):
        await task


def busy(free_gib: int, used_gib: int) -> Hardware:
    """Beside a process of somebody else."""
    process = GpuProcess(pid=7, used_bytes=used_gib * GIB)
    gpus = tuple(
        gpu.evolve(free_bytes=free_gib * GIB, processes=(process,)) for gpu in machine().gpus
    )
    return machine().evolve(gpus=gpus)


async def test_another_process_that_takes_memory_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.controller.steps.start_gate._POLL_S", 0.001)
    looks = iter([busy(23, 0), busy(22, 1), busy(22, 1)])

    async def hardware() -> Hardware:
        return next(looks)

    small = PLAN.evolve(memory=PLAN.memory.evolve(budget_bytes=10 * GIB, beside_bytes=GIB))
    start_gate, words = StartGate(ObservedStarts(), hardware, 1800.0), list[str]()
    start_gate.record_engines([])
    await start_gate.wait_for_turn(attempt(9, plan=small, model="new"), words.append)
    assert words == [
        "waits until the memory of its GPUs is stable: process 7 on GPU 1 had 0.00 GiB and has"
        " 1.00 GiB"
    ]


async def test_a_plan_whose_memory_is_gone_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.controller.steps.start_gate._POLL_S", 0.001)

    async def hardware() -> Hardware:
        return busy(2, 20)

    start_gate = StartGate(ObservedStarts(), hardware, 1800.0)
    start_gate.record_engines([])
    with pytest.raises(WithdrawnError, match=r"GPU 1 has 2\.00 GiB free") as error:
        await start_gate.wait_for_turn(start(9), lambda _: None)
    assert error.value.failure.disturbed
    assert error.value.failure.proven_subject == "nothing"


async def test_the_memory_that_an_engine_took_is_known_if_nobody_else_moved() -> None:
    now = machine()

    async def hardware() -> Hardware:
        return now

    start_gate, new_start = StartGate(ObservedStarts(), hardware, 1800.0), start(9)
    start_gate.record_engines([])
    assert await start_gate.foreign_change(new_start) == ("", None)
    await start_gate.wait_for_turn(new_start, lambda _: None)
    before = now.gpus[1].free_bytes or 0
    gpu_process = GpuProcess(pid=20, used_bytes=20 * GIB)
    now = now.evolve(
        gpus=tuple(
            gpu.evolve(free_bytes=before - 20 * GIB, processes=(gpu_process,)) for gpu in now.gpus
        )
    )
    assert await start_gate.foreign_change(new_start) == ("", 20 * GIB)


def test_the_gate_knows_a_tried_plan_beside_a_serving_one() -> None:
    serves, trial = attempt(1, "ready", plan=PLAN), attempt(2, plan=PLAN)
    fleet = Fleet()
    fleet.models["m"] = ManagedModel(
        wish(), 0.0, replicas=[ReplicaState("m", 0, serves)], trial=ReplicaState("m", 0, trial)
    )
    names = {serves.instance_name, trial.instance_name}
    assert {
        holder.instance: holder.is_proved for holder in fleet.holders(names, set(), 1.0)
    } == dict(zip(sorted(names), (True, False), strict=True))


async def test_a_model_that_was_given_too_much_measures_from_then_on() -> None:
    observations = ObservedStarts()
    shared_plan = plan(
        replicas=1, tensor_parallel=1, max_context=8192, args={"gpu-memory-utilization": 0.78}
    )
    start_gate = gate(observations)
    start_gate.record_engines([])
    new_start = attempt(9, plan=shared_plan.evolve(gpus=(UUID,)), model="new")
    assert await start_gate.wait_for_turn(new_start, lambda _: None, accepts_cache_bytes=True)
    oom = Failure(
        kind="gpu_oom", phase="capturing graphs", message="out of memory", proven_subject="memory"
    )
    assert "from now on it measures" in start_gate.record_failure(new_start, oom)
    observations.enter_phase(new_start, "settled")
    start_gate.record_engines([])
    second_attempt = attempt(10, plan=new_start.plan.evolve(grade="verified"), model="new")
    assert (
        await start_gate.wait_for_turn(second_attempt, lambda _: None, accepts_cache_bytes=True)
        is None
    )
    assert not start_gate.record_failure(second_attempt, oom), (
        "a measuring engine that lacks memory says what is so"
    )


async def test_a_failing_kernel_fails_a_start_with_bytes_too() -> None:
    start_gate = gate(ObservedStarts())
    start_gate.record_engines([])
    shared_plan = plan(
        replicas=1, tensor_parallel=1, max_context=8192, args={"gpu-memory-utilization": 0.78}
    )
    new_start = attempt(9, plan=shared_plan.evolve(gpus=(UUID,)), model="new")
    assert await start_gate.wait_for_turn(new_start, lambda _: None, accepts_cache_bytes=True)
    assert not start_gate.record_failure(
        new_start,
        Failure(
            kind="kernel_refused",
            phase="loading weights",
            message="no kernel",
            proven_subject="kernel",
        ),
    )
