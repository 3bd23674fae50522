"""The searches for better plans, one at a time, and the plans that their owner takes."""

from __future__ import annotations

import asyncio
import time

from gateway.controller.fleet.fleet import Fleet
from gateway.controller.owner_commands import OwnerCommands
from gateway.domain.wish import WishOrigin
from gateway.errors import Conflict, NotFound
from gateway.measuring.tuning.plan_search import PlanSearch, SearchTools
from gateway.measuring.tuning.tuning_report import SearchOptions, TuningReport


class Tunings:
    """Begins, shows, ends and applies searches. The last search of each model is kept."""

    def __init__(self, fleet: Fleet, owner_commands: OwnerCommands, tools: SearchTools) -> None:
        self._fleet = fleet
        self._owner_commands = owner_commands
        self._tools = tools
        self._searches: dict[str, PlanSearch] = {}
        self._current_run: tuple[str, asyncio.Task[None]] | None = None

    async def start(self, name: str, options: SearchOptions) -> TuningReport:
        """Begin a search, and end a search that the gateway began by itself. Raises NotFound,
        Conflict."""
        model = self._fleet.model(name)
        if not options.is_automatic and self._current_run is not None:
            running_name = self._current_run[0]
            if self._searches[running_name].report.is_automatic:
                await self.stop(running_name, "its owner tunes by order")
        self._refuse_second()
        search = PlanSearch(model, self._tools, options)
        await search.check()
        self._refuse_second()
        self._searches[name] = search
        task = asyncio.create_task(search.run())

        def forget_run(_: object) -> None:
            self._current_run = None

        task.add_done_callback(forget_run)
        self._current_run = name, task
        return search.report

    def report(self, name: str) -> TuningReport:
        """The running or last search of a model. Raises NotFound."""
        return self._search(name).report

    async def stop(self, name: str, reason: str = "its owner stopped it") -> TuningReport:
        """End the running search of a model, if any. reason: for people. Raises NotFound."""
        search = self._search(name)
        if self._current_run is not None and self._current_run[0] == name:
            self._current_run[1].cancel(reason)
            await asyncio.wait({self._current_run[1]})
        return search.report

    async def apply(self, name: str, key: str = "") -> TuningReport:
        """Change the model to the best plan. Raises NotFound, Conflict, StoreError.

        key: name of the caller's key, for the history of wishes.
        """
        search = self._search(name)
        model = self._fleet.model(name)
        report = search.report
        if report.wish is None or report.state == "running" or report.is_applied:
            raise Conflict(
                f"There is no better plan of {name} to take.",
                hint=f"`fitserve tune {name}` searches for one.",
            )
        origin = WishOrigin(at=time.time(), key=key, way="tuning")
        await self._owner_commands.change(
            model, search.wish, report.wish, restarts=True, origin=origin
        )
        search.record_application()
        return search.report

    async def close(self) -> None:
        if self._current_run is not None:
            self._current_run[1].cancel()
            await asyncio.wait({self._current_run[1]})

    @property
    def is_busy(self) -> bool:
        """Whether a search runs."""
        return self._current_run is not None

    def _search(self, name: str) -> PlanSearch:
        self._fleet.model(name)
        search = self._searches.get(name)
        if search is None:
            raise NotFound(
                f"{name} was not tuned since this gateway started.",
                hint=f"`fitserve tune {name}` searches for a faster plan.",
            )
        return search

    def _refuse_second(self) -> None:
        if self._current_run is not None:
            raise Conflict(
                f"{self._current_run[0]} is being tuned.",
                hint="Two searches would disturb each other. Try again later.",
            )
