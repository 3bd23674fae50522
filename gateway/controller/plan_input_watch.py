"""Watch over the inputs of plans, so that models without a plan are planned again for a reason."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import REPLAN_S, ManagedModel
from gateway.controller.steps.plan_input_reader import PlanInputReader
from gateway.logging import Logger

log = Logger("fitserve.loop")


class PlanInputWatch:
    """Lets models without a plan look again after a change of their plans' inputs.

    A look takes place every `REPLAN_S` seconds while a model has no plan. A task makes it, so no
    hanging disk holds the loop up.
    """

    def __init__(self, fleet: Fleet, reader: PlanInputReader, wake: Callable[[], None]) -> None:
        self._fleet = fleet
        self._reader = reader
        self._wake = wake
        self._neighbours: object = None
        """The engines that had memory at the last look; None before the first."""
        self._task: asyncio.Task[None] | None = None
        self._looked_at = 0.0

    def start(self) -> None:
        """Begin a look if one is due."""
        if self._task is not None and not self._task.done():
            return
        now = time.monotonic()
        if now - self._looked_at < REPLAN_S:
            return
        self._looked_at = now
        if blocked_models := [model for model in self._fleet.models.values() if _is_blocked(model)]:
            self._task = asyncio.create_task(self._refresh_inputs(blocked_models))

    async def close(self) -> None:
        """End a look that is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _refresh_inputs(self, blocked_models: Sequence[ManagedModel]) -> None:
        try:
            await self.compare_inputs(blocked_models)
        except Exception as error:
            # The slow look of each model still comes.
            log.warning("the inputs of plans could not be read", error=str(error))

    async def compare_inputs(self, blocked_models: Sequence[ManagedModel]) -> None:
        """Compare with the last plan of each model, and let those look again whose plans may be
        others."""
        inputs = await self._reader.read(blocked_models)
        # A first look knows nothing about the time of the plans before it.
        neighbours = self._fleet.placed_attempts()
        former_neighbours = self._neighbours
        self._neighbours = neighbours
        is_other = former_neighbours is not None and former_neighbours != neighbours
        changed_names = {
            model.wish.name
            for model in blocked_models
            if any(
                is_other
                or inputs[model.wish.name].may_help(replica.planning.failed_planning.basis.inputs)
                for replica in model.all_replicas
                if replica.planning.blocked_reason is not None
                and replica.planning.failed_planning is not None
            )
        }
        if changed_names:
            self._fleet.schedule_replanning(changed_names)
            self._wake()


def _is_blocked(model: ManagedModel) -> bool:
    return not model.is_deleting and any(
        replica.planning.blocked_reason is not None and not replica.planning.awaited_offers
        for replica in model.replicas
    )
