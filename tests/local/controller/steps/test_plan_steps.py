"""A plan that is made while memory comes back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import pytest

from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import ManagedModel
from gateway.controller.steps.plan_steps import PlanSteps
from gateway.controller.steps.replica_planner import ReplicaPlanner
from gateway.domain import Hardware, Wish
from gateway.domain.plan_request import PlanRequest, PlanResult
from gateway.machine.gpu_watch import GpuWatch
from tests.support.makers import machine, wish

pytestmark = pytest.mark.anyio


class FullMachine:
    """A planner that finds no room. The memory of another engine comes back meanwhile, or not."""

    def __init__(self, fleet: Fleet, *, frees: bool) -> None:
        self._fleet, self._frees = fleet, frees

    async def hardware(self) -> Hardware:
        return machine()

    async def resolve(self, wish: Wish) -> Wish:
        return wish

    async def plan(self, request: PlanRequest) -> PlanResult:
        if self._frees:
            self._fleet.unblock()
        return PlanResult(None, "the GPU is full")

    async def check(
        self, request: PlanRequest, problems: Mapping[str, str], limit_s: float
    ) -> PlanResult:
        return PlanResult(None, "the GPU is full")


@pytest.mark.parametrize("frees", [True, False])
async def test_memory_that_comes_back_while_a_plan_is_made_is_not_missed(frees: bool) -> None:
    fleet = Fleet()
    model = fleet.admit(ManagedModel(wish(check=False), 0.0))
    (replica,) = model.replicas

    async def keep_commits(_model: ManagedModel, _commits: Mapping[str, str]) -> None:
        """No repository is read."""

    planner = ReplicaPlanner(FullMachine(fleet, frees=frees), 1.0, keep_commits)
    steps = PlanSteps(planner, cast("Any", None), cast("Any", None), GpuWatch())
    room = partial(fleet.planning_context, model, replica)
    await steps.plan(model, replica, room, room)
    assert replica.blocked == (None if frees else "the GPU is full")
    assert replica.looks_again is frees
