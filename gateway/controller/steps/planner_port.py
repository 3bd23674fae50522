"""The contract of the planner that the gateway gives to its controller: from a wish to a decision,
for the machine as it is now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from gateway.domain import (
    Asked,
    EngineAnswer,
    Hardware,
    Planned,
    Question,
    RunningPlan,
    Sharing,
    Wish,
)
from gateway.domain.plan import ALONE


class PlannerPort(Protocol):
    """`gateway.planner.service.machine_planner.MachinePlanner` is the planner of a gateway that
    runs."""

    async def hardware(self) -> Hardware:
        """What is in this machine now; GPUs that are lost say so."""
        ...

    async def named(self, wish: Wish) -> Wish:
        """The wish with the engine that its image holds, where it names the image alone, and with
        the UUIDs of GPUs that it names by their numbers. Raises BadRequest for an image that may
        not be
        started, and HostError for one that cannot be asked."""
        ...

    async def decide(
        self,
        wish: Wish,
        facts: Sequence[str],
        claims: Mapping[str, int],
        hardware: str | None = None,
        answers: Mapping[Question, EngineAnswer] | None = None,
        pins: Mapping[str, str] | None = None,
        running: RunningPlan | None = None,
        *,
        others: bool = False,
        sharing: Sharing = ALONE,
    ) -> Planned:
        """Read the model, look at the machine, or at the snapshot that `hardware` names, and plan.

        `facts` are those of the store, as they are kept there; `claims` are bytes per GPU UUID of
        engines that run or start; `answers` are what engines said of this model; `pins` the digests
        of images, by name, that this model's engines are started from; `running` is what a rival is
        looked for to. `others`: the decision tells too what engines would give that cannot be
        started here. `sharing`: who else has GPUs here, what they could give, and what the model
        keeps to for them. Raises BadModel, BadFlag, NotFound, NoPlan.
        """
        ...

    async def check(
        self,
        wish: Wish,
        facts: Sequence[str],
        claims: Mapping[str, int],
        answers: Mapping[Question, EngineAnswer],
        problems: Mapping[str, str],
        pins: Mapping[str, str],
        limit_s: float,
        sharing: Sharing = ALONE,
    ) -> tuple[Planned, Asked]:
        """The same, once the engines of this machine were asked for at most `limit_s`. The forecast
        stays where one could not be asked:
        then its problem is told by its name. Engines of `problems` are not asked again."""
        ...
