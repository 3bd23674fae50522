"""The contract of the planner that the gateway gives to its controller: from a wish to a decision,
for the machine as it is now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from gateway.domain import Hardware, Wish
from gateway.domain.plan_request import PlanRequest, PlanResult


class PlannerPort(Protocol):
    """`gateway.planner.service.machine_planner.MachinePlanner` is the planner of a gateway that
    runs."""

    async def hardware(self) -> Hardware:
        """What is in this machine now; GPUs that are lost say so."""
        ...

    async def resolve(self, wish: Wish) -> Wish:
        """The wish with the engine that its image holds, where it names the image alone, and with
        the UUIDs of GPUs that it names by their numbers. Raises BadRequest for an image that may
        not be
        started, and HostError for one that cannot be asked."""
        ...

    async def plan(self, request: PlanRequest) -> PlanResult:
        """Read the model and the machine, and plan.

        Raises BadModel, BadFlag, NotFound, NoPlan.
        """
        ...

    async def check(
        self, request: PlanRequest, problems: Mapping[str, str], limit_s: float
    ) -> PlanResult:
        """The plan after questions to the engines of this machine, for at most `limit_s`.

        Engines of `problems` are not asked. The forecast stands if an engine cannot be asked, and
        `PlanResult.asked` says why.
        """
        ...
