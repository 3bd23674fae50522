"""The preparation of a start on this machine before its turn: image, weights, page cache."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gateway.domain import Plan
from gateway.logging import Logger

log = Logger("fitserve.loop")

T = TypeVar("T")
Report = Callable[[str], None]


@dataclass(frozen=True)
class LaunchFiles:
    """The files of a start on this machine."""

    weights: Path
    drafter: Path | None
    adapters: Mapping[str, Path]


class Preparation:
    """Files that are brought, and then read ahead, until `cancel`.

    A start waits only for `files`. The reading goes on while its engine imports its code.
    """

    def __init__(
        self,
        plan: Plan,
        bring: Callable[[Plan, Report], Awaitable[LaunchFiles]],
        read_ahead: Callable[[Plan, LaunchFiles], Awaitable[object]],
        tasks: set[asyncio.Task[object]],
    ) -> None:
        """tasks: has those of this preparation until they end, which takes a moment after `end`:
        their processes are waited for."""
        self._plan = plan
        self._read_ahead = read_ahead
        self._report: Report = _ignore
        self._progress = ""
        self._tasks = tasks
        self._files = self._start_work(self._fetch_files(bring))
        self._files.add_done_callback(_log_failure)
        self._reading: asyncio.Task[object] | None = None

    def serves(self, plan: Plan) -> bool:
        """Whether a start by this plan needs the same, and nothing has failed."""
        has_failed = self._files.done() and (
            self._files.cancelled() or self._files.exception() is not None
        )
        return not has_failed and _file_sources(plan) == _file_sources(self._plan)

    async def files(self, report: Report) -> LaunchFiles:
        """The files, once they are here. Raises HostError, BadModel and their kin."""
        self._report = report
        if self._progress and not self._files.done():
            report(self._progress)
        # A cancelled start leaves the files for the next one.
        return await asyncio.shield(self._files)

    def cancel(self) -> None:
        """Bring and read nothing more."""
        self._files.cancel()
        if self._reading is not None:
            self._reading.cancel()

    async def _fetch_files(
        self, bring: Callable[[Plan, Report], Awaitable[LaunchFiles]]
    ) -> LaunchFiles:
        files = await bring(self._plan, self._record_progress)
        self._reading = self._start_work(self._read_files(files))
        return files

    def _start_work(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _read_files(self, files: LaunchFiles) -> object:
        return await self._read_ahead(self._plan, files)

    def _record_progress(self, progress: str) -> None:
        self._progress = progress
        self._report(progress)


def _file_sources(plan: Plan) -> tuple[object, ...]:
    return plan.engine.kind, plan.model, plan.drafter, plan.adapters


def _log_failure(files: asyncio.Task[LaunchFiles]) -> None:
    # A start that needs them meets the failure itself.
    if not files.cancelled() and (error := files.exception()) is not None:
        log.info("preparation failed", error=str(error))


def _ignore(_progress: str) -> None: ...
