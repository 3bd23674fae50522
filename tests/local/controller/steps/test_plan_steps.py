"""Plans that find nothing: while memory comes back, and of many models at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import REPLAN_S, ManagedModel
from gateway.controller.plan_input_watch import PlanInputWatch
from gateway.controller.steps.plan_input_reader import PlanInputReader
from gateway.controller.steps.plan_steps import PlanSteps
from gateway.controller.steps.replica_planner import ReplicaPlanner
from gateway.controller.steps.replica_steps import ReplicaSteps
from gateway.domain import EngineRef, Hardware, OpenQuestions, Wish
from gateway.domain.plan_request import PlanRequest, PlanResult
from gateway.domain.units import GIB
from gateway.machine.gpu_watch import GpuWatch
from tests.support.makers import attempt, machine, wish
from tests.support.versions import NEWEST_VLLM

pytestmark = pytest.mark.anyio


class FullMachine:
    """A planner that finds no room. The memory of another engine comes back meanwhile, or not."""

    def __init__(self, fleet: Fleet, *, frees: bool) -> None:
        self._fleet, self._frees = fleet, frees
        self.hardware_now = machine()
        self.planned: list[str] = []

    async def hardware(self) -> Hardware:
        return self.hardware_now

    async def resolve(self, wish: Wish) -> Wish:
        return wish

    async def preview(self, request: PlanRequest) -> PlanResult:
        return await self.plan(request)

    async def plan(self, request: PlanRequest) -> PlanResult:
        self.planned.append(request.wish.name)
        await asyncio.sleep(0)
        if self._frees:
            self._fleet.schedule_replanning()
        return PlanResult(None, "the GPU is full")

    async def check(
        self, request: PlanRequest, problems: Mapping[str, str], limit_s: float
    ) -> PlanResult:
        return PlanResult(None, "the GPU is full")


class AskedMachine(FullMachine):
    """A full machine whose engine is asked. Meanwhile another model takes a GPU."""

    async def plan(self, request: PlanRequest) -> PlanResult:
        questions = OpenQuestions(EngineRef(kind="vllm", version=NEWEST_VLLM), ())
        return (await super().plan(request))._replace(questions=(questions,))

    async def check(
        self, request: PlanRequest, problems: Mapping[str, str], limit_s: float
    ) -> PlanResult:
        self._fleet.models["other"].replicas[0].attempt = attempt(model="other")
        return await super().check(request, problems, limit_s)


async def _keep_commits(_model: ManagedModel, _commits: Mapping[str, str]) -> None:
    """No repository is read."""


class Planning:
    """The steps that plan the models of a fleet."""

    def __init__(self, fleet: Fleet, planner: FullMachine, data: Path) -> None:
        self.fleet, self.planner = fleet, planner
        reader = PlanInputReader(planner.hardware, list, data)
        replica_planner = ReplicaPlanner(planner, 1.0, _keep_commits)
        nothing = cast("Any", None)
        self.steps = PlanSteps(replica_planner, reader, nothing, nothing, GpuWatch())
        self.watch = PlanInputWatch(fleet, reader, lambda: None)

    async def plan(self, model: ManagedModel) -> None:
        (replica,) = model.replicas
        room = partial(self.fleet.planning_context, model, replica)
        await self.steps.plan(model, replica, room, room)

    async def make_plans(self) -> list[str]:
        """Plan each model that is not blocked, as a pass does. Returns the names of all plans."""
        count = len(self.planner.planned)
        waiting = [
            model
            for model in self.fleet.models.values()
            if model.replicas[0].planning.blocked_reason is None
        ]
        await asyncio.gather(*map(self.plan, waiting))
        return self.planner.planned[count:]

    def admit(self, *names: str) -> None:
        for name in names:
            self.fleet.add_model(ManagedModel(wish(name=name, source="/nothing", check=False), 0.0))

    def free(self, moved_bytes: int) -> None:
        first, *other_gpus = self.planner.hardware_now.gpus
        assert first.free_bytes is not None
        free = first.evolve(free_bytes=first.free_bytes + moved_bytes)
        self.planner.hardware_now = self.planner.hardware_now.evolve(gpus=(free, *other_gpus))


@pytest.fixture
def planning(tmp_path: Path) -> Planning:
    fleet = Fleet()
    return Planning(fleet, FullMachine(fleet, frees=False), tmp_path)


OLD = [f"old-{number}" for number in range(121)]
NEW = [f"new-{number}" for number in range(59)]


async def test_models_without_a_plan_hold_no_new_model_up(planning: Planning) -> None:
    planning.admit(*OLD)
    assert sorted(await planning.make_plans()) == sorted(OLD)
    planning.free(GIB)
    planning.fleet.schedule_replanning()
    planning.admit(*NEW)
    order = await planning.make_plans()
    assert sorted(order) == sorted(OLD + NEW), "each is planned once"
    last = max(order.index(name) for name in NEW)
    assert last < 1.5 * len(NEW), "each fourth turn is for the longest wait"


async def test_equal_inputs_are_planned_once(planning: Planning) -> None:
    planning.admit(*OLD)
    await planning.make_plans()
    reasons = {replica.planning.blocked_reason for replica in planning.fleet.replicas()}
    for moved_bytes in (0, -3 * GIB, 3 * GIB):
        planning.free(moved_bytes)
        planning.fleet.schedule_replanning()
        assert await planning.make_plans() == []
        await planning.watch.compare_inputs([*planning.fleet.models.values()])
        assert await planning.make_plans() == []
    assert {replica.planning.blocked_reason for replica in planning.fleet.replicas()} == reasons
    planning.free(GIB)
    await planning.watch.compare_inputs([*planning.fleet.models.values()])
    assert sorted(await planning.make_plans()) == sorted(OLD)


async def test_a_change_reaches_waiting_plans(planning: Planning) -> None:
    planning.admit(*OLD)
    await planning.make_plans()
    planning.free(GIB)
    planning.fleet.schedule_replanning()
    plans = asyncio.create_task(planning.make_plans())
    for _ in range(5):
        await asyncio.sleep(0)
        planning.fleet.schedule_replanning()
    await plans
    second_plans = await planning.make_plans()
    assert second_plans == [], "nothing has changed since their turns"


async def test_a_look_by_time_plans_in_any_case(planning: Planning) -> None:
    planning.admit("a")
    await planning.make_plans()
    (replica,) = planning.fleet.models["a"].replicas
    replica.planning.blocked_at -= 2 * REPLAN_S
    ReplicaSteps._schedule_replanning(replica)
    assert await planning.make_plans() == ["a"]


async def test_a_request_goes_before_new_models(planning: Planning) -> None:
    planning.admit(*NEW, "asked")
    planning.fleet.models["asked"].has_requests = True
    order = await planning.make_plans()
    assert order.index("asked") <= 2


@pytest.mark.parametrize("frees", [True, False])
async def test_memory_that_comes_back_while_a_plan_is_made_is_not_missed(
    frees: bool, tmp_path: Path
) -> None:
    fleet = Fleet()
    model = fleet.add_model(ManagedModel(wish(check=False), 0.0))
    (replica,) = model.replicas

    await Planning(fleet, FullMachine(fleet, frees=frees), tmp_path).plan(model)
    assert replica.planning.blocked_reason == (None if frees else "the GPU is full")
    assert replica.planning.looks_again is frees


async def test_a_gpu_that_was_taken_while_an_engine_was_asked_is_not_missed(tmp_path: Path) -> None:
    fleet = Fleet()
    other_model = fleet.add_model(ManagedModel(wish(name="other"), 0.0))
    model = fleet.add_model(ManagedModel(wish(), 0.0))
    planning = Planning(fleet, AskedMachine(fleet, frees=False), tmp_path)
    await planning.plan(model)
    assert model.replicas[0].planning.blocked_reason == "the GPU is full"

    other_model.replicas[0].attempt = None
    other_model.replicas[0].planning.blocked_reason = "stopped"
    fleet.schedule_replanning({"m"})
    assert await planning.make_plans(), "the last plan was made beside the other model"
