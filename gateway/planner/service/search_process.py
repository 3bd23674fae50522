"""The gateway's end of the search process (search_program.py)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from gateway.errors import BadModel, Busy
from gateway.planner.service.messages import (
    SEARCH_REQUEST,
    PlanAnswer,
    SearchProgress,
    SearchRequest,
    WorkerConfig,
    pack,
)
from gateway.planner.service.plan_process import planning_error, read_frame, start_child
from gateway.worker_process import kill

# The limits of one search, without its wait: for the reads, then for the plans.
_PATIENCE_S = 300.0
# Searches that may wait for the running one.
_MAX_WAITING_SEARCHES = 3
_PROGRAM = "gateway.planner.service.search_program"


class SearchProcess:
    """Searches for models, one at a time, each in a child of its own."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self._turn = asyncio.Lock()
        self._waiting_count = 0
        self._child: asyncio.subprocess.Process | None = None
        self._progress: dict[str, SearchProgress] = {}

    def progress(self, name: str) -> SearchProgress:
        """The progress of a search that waits or runs; phase `none`: there is none of this name."""
        return self._progress.get(name, SearchProgress("none"))

    async def search(self, request: SearchRequest, name: str = "") -> dict[str, Any]:
        """The answer of `search_models`. Cancellation ends the child.

        name: the name of the search in `progress`. Raises BadRequest, BadModel, Busy.
        """
        if self._waiting_count > _MAX_WAITING_SEARCHES:
            raise Busy(
                f"{_MAX_WAITING_SEARCHES} searches wait for the running one.",
                hint="Try again in a minute.",
                retry_after_s=30,
            )
        self._waiting_count += 1
        self._record(name, SearchProgress())
        try:
            async with self._turn:
                return await self._exchange(pack([SEARCH_REQUEST.dump_json(request)]), name)
        finally:
            self._waiting_count -= 1
            self._progress.pop(name, None)

    def _record(self, name: str, progress: SearchProgress) -> None:
        if name:
            self._progress[name] = progress

    async def close(self) -> None:
        """End the running search."""
        if self._child is not None:
            await kill(self._child)

    async def _exchange(self, message: bytes, name: str) -> dict[str, Any]:
        """Send the message to a new child, and read its progress and answer."""
        self._record(name, SearchProgress("searching"))
        child = self._child = await start_child(_PROGRAM, self.config)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                assert child.stdin is not None  # noqa: S101
                child.stdin.write(message)
                await child.stdin.drain()
                while isinstance(head := json.loads(await read_frame(child)), dict):
                    self._record(name, SearchProgress(**head))
                answer = PlanAnswer(*head)
                models: dict[str, Any] = json.loads(await read_frame(child))
        except TimeoutError:
            raise BadModel(
                f"The search took longer than {_PATIENCE_S:.0f} seconds.",
                hint="Search for fewer models.",
            ) from None
        except (EOFError, ConnectionError):
            raise BadModel(
                "The search ended before its answer.",
                hint="Search for fewer models. The gateway's log may say more.",
            ) from None
        finally:
            self._child = None
            await kill(child)
        if answer.error is not None:
            raise planning_error("a search for models", answer.error)
        return models
