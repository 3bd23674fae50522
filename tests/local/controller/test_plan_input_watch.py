"""When a model without a plan is planned anew: after a change, and else ever more seldom."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.fleet.plan_inputs import ContextState, FailedPlanning, PlanBasis
from gateway.controller.plan_input_watch import PlanInputWatch
from gateway.controller.steps.plan_input_reader import PlanInputReader
from gateway.controller.steps.plan_steps import PlanSteps
from gateway.controller.steps.replica_steps import ReplicaSteps
from gateway.domain import Hardware
from gateway.domain.units import GIB, MIB
from gateway.machine.gpu_watch import GpuWatch
from tests.support.makers import attempt, machine, wish
from tests.support.patience import hang_s
from tests.support.running import model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio


def fact(kind: str) -> str:
    return json.dumps({"kind": kind, "scope": {"engine": "vllm"}})


REFUSAL = fact("kernel_fails")


class Scene:
    """Two models without a plan, one of them in a folder, and the inputs of plans."""

    def __init__(self, folder: Path) -> None:
        self.fleet, self.hardware = Fleet(), machine()
        self.facts, self.data, self.source = [REFUSAL], folder / "data", folder / "model"
        self.source.mkdir()
        self.data.mkdir()
        self.woken = 0
        for name, source in (("a", str(self.source)), ("b", "frob/model")):
            self.fleet.add_model(ManagedModel(wish(name=name, source=source), 0.0))
        self.reader = PlanInputReader(self._hardware, lambda: self.facts, self.data)
        self.watch = PlanInputWatch(self.fleet, self.reader, self._wake)

    async def block(self) -> None:
        """Make vain plans of the models that look again, or have none yet."""
        models = [*self.fleet.models.values()]
        inputs = await self.reader.read(models)
        for replica in self.fleet.replicas():
            if replica.attempt is None and replica.planning.blocked_reason is None:
                replica.planning.block_planning("no room")
                basis = PlanBasis(inputs[replica.model], ContextState(0, {}, frozenset()), ())
                replica.planning.failed_planning = FailedPlanning(
                    basis, "no room", waits_for_request=False, at=0.0
                )
                replica.planning.looks_again = False

    async def looking(self) -> set[str]:
        """The models that a look lets plan again."""
        await self.block()
        await self.watch.compare_inputs([*self.fleet.models.values()])
        return {replica.model for replica in self.fleet.replicas() if replica.planning.looks_again}

    def change_gpu(self, **fields: Any) -> None:
        first, *rest = self.hardware.gpus
        self.hardware = self.hardware.evolve(gpus=(first.evolve(**fields), *rest))

    def free(self, moved_bytes: int) -> None:
        first = self.hardware.gpus[0]
        assert first.free_bytes is not None
        self.change_gpu(free_bytes=first.free_bytes + moved_bytes)

    def place(self, **fields: Any) -> None:
        """An engine of another model that is not blocked."""
        other_model = self.fleet.models.get("c")
        other_model = other_model or self.fleet.add_model(ManagedModel(wish(name="c"), 0.0))
        other_model.replicas[0] = ReplicaState("c", 0, attempt=attempt(**fields))

    async def _hardware(self) -> Hardware:
        return self.hardware

    def _wake(self) -> None:
        self.woken += 1


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")


CHANGES: dict[str, tuple[Callable[[Scene], object], set[str]]] = {
    "nothing": (lambda _: None, set()),
    "a little memory": (lambda scene: scene.free(100 * MIB), set()),
    "much memory": (lambda scene: scene.free(3 * GIB), {"a", "b"}),
    "much less memory": (lambda scene: scene.free(-3 * GIB), set()),
    "a lost GPU": (lambda scene: scene.change_gpu(loss_reason="Xid 79."), {"a", "b"}),
    "processes of others": (lambda scene: scene.change_gpu(processes=()), set()),
    "a fact": (lambda scene: scene.facts.append(fact("needs_memory")), {"a", "b"}),
    "a fact that rules out": (lambda scene: scene.facts.append(fact("engine_fails")), set()),
    "a fact that ruled out, removed": (lambda scene: scene.facts.remove(REFUSAL), {"a", "b"}),
    "a measured speed": (lambda scene: scene.facts.append(fact("speed_ratio")), set()),
    "an engine": (lambda scene: touch(scene.data / "engines/vllm-1/.complete"), {"a", "b"}),
    "a learned version": (lambda scene: touch(scene.data / "learned/vllm/1.yaml"), {"a", "b"}),
    "a file": (lambda scene: touch(scene.source / "model.safetensors"), {"a"}),
    "a download": (
        lambda scene: touch(scene.data / "hub/models--frob--model/snapshots/0/config.json"),
        {"b"},
    ),
    "an engine of a neighbour": (lambda scene: scene.place(), {"a", "b", "c"} - {"c"}),
}


@pytest.mark.parametrize("name", CHANGES)
async def test_models_are_planned_anew_after_a_change_of_their_inputs(
    tmp_path: Path, name: str
) -> None:
    scene = Scene(tmp_path)
    assert await scene.looking() == set(), "the first look has nothing to compare with"
    change, names = CHANGES[name]
    change(scene)
    assert await scene.looking() - {"c"} == names
    assert await scene.looking() - {"c"} == set(), "a change counts once"


async def test_memory_that_moves_slowly_counts_by_its_sum(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    await scene.looking()
    looks = 0
    for _ in range(40):
        scene.free(100 * MIB)
        looks += bool(await scene.looking())
    # 4,000 MiB in bands of a fiftieth of 24 GiB.
    assert 5 <= looks <= 9


def test_a_model_is_planned_ever_more_seldom_while_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica, now, plans = ReplicaState("m", 0), 1000.0, list[float]()
    monkeypatch.setattr("time.monotonic", lambda: now)
    replica.planning.block_planning("no room")
    while now < 1000 + 3600:
        now += 1
        ReplicaSteps._schedule_replanning(replica)
        if replica.planning.looks_again:
            plans.append(now - 1000)
            replica.planning.looks_again = False
            replica.planning.block_planning("no room")
    assert len(plans) == 9
    assert plans[0] == 31, "the first is as soon as ever"


async def test_memory_that_becomes_free_brings_a_plan_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.controller.plan_input_watch.REPLAN_S", 0.05)
    monkeypatch.setattr("gateway.controller.fleet.managed_model.REPLAN_S", 10 * hang_s())
    readings, plans = 0, 0
    hardware = machine("cpu").evolve(ram_available_bytes=0, ram_total_bytes=1024)
    plan = PlanSteps.plan

    def read(_: GpuWatch, __: Path) -> Hardware:
        nonlocal readings
        readings += 1
        return hardware

    def count_call(*values: Any) -> Any:
        nonlocal plans
        plans += 1
        return plan(*values)

    monkeypatch.setattr(GpuWatch, "hardware", read)
    monkeypatch.setattr(PlanSteps, "plan", count_call)
    async with running(tmp_path, lambda spec: EngineScript(model=spec.model)) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "no_plan")
        before, reading_count = plans, readings
        async with asyncio.timeout(hang_s()):
            while readings < reading_count + 5:
                await asyncio.sleep(0.02)
        assert plans == before, "looks without a change make no plan"
        hardware = machine("cpu")
        await gateway.until("m", "ready")
        assert plans == before + 1
