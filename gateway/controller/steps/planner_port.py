"""The contract between the controller and the planner of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from gateway.domain import Hardware, Wish
from gateway.domain.plan_request import PlanRequest, PlanResult


class PlannerPort(Protocol):
    """A planner. A running gateway has `gateway.planner.service.machine_planner.MachinePlanner`."""

    async def hardware(self) -> Hardware:
        """The present hardware of this machine, lost GPUs marked."""
        ...

    async def resolve(self, wish: Wish) -> Wish:
        """The wish with the engine of its image and the UUIDs of its GPUs.

        Raises BadRequest for an image that may not be started, and HostError for an image that
        gives no answer.
        """
        ...

    async def plan(self, request: PlanRequest) -> PlanResult:
        """Read the model and the machine, and plan.

        Raises BadModel, BadFlag, NotFound, NoPlan.
        """
        ...

    async def preview(self, request: PlanRequest) -> PlanResult:
        """The result of `plan`, for a caller that can ask again. Raises Busy while many plans are
        queued."""
        ...

    async def check(
        self, request: PlanRequest, problems: Mapping[str, str], limit_s: float
    ) -> PlanResult:
        """The plan after questions to the engines of this machine, for at most `limit_s`.

        Engines of `problems` are not asked. The forecast stands if an engine cannot be asked, and
        `PlanResult.inquiry` says why.
        """
        ...
