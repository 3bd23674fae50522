"""The logs of an engine's parts as one log, up to the last words after the end of a part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from enum import Enum, auto

from gateway.errors import FitserveError, HostError
from gateway.hosts.host import MAX_LINE, Host

QUIET_LOOKS = 10
"""Looks in a row without a new line, after which the remaining parts have said their last words."""
LOOK_PAUSE_S = 0.5
SETTLE_LIMIT_S = 30.0
"""The longest wait for last words: a part may print for ever, and a machine may be lost."""
_MAX_QUEUED_LINES = 1000


class _Mark(Enum):
    PART_ENDED = auto()
    SETTLED = auto()


class PartLogs:
    """Reads the logs of all parts concurrently.

    A part that ends leaves the others waiting for ever, so their logs have no end. A look at their
    processes takes the same way as their lines, and as long on a busy machine. So last words are
    awaited for a number of looks, and not for a time.
    """

    def __init__(self, host: Host, marks: Mapping[str, bytes]) -> None:
        """marks: the beginning of each line, by the name of the part."""
        self._host = host
        self._marks = marks
        self._open_parts = set(marks)
        self._line_count = 0
        self._queue: asyncio.Queue[bytes | HostError | _Mark] = asyncio.Queue(_MAX_QUEUED_LINES)

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """The lines of all parts as they come. Raises HostError."""
        tasks = [asyncio.create_task(self._copy(part)) for part in self._marks]
        is_settling = False
        try:
            while self._open_parts or not self._queue.empty():
                line = await self._queue.get()
                if isinstance(line, HostError):
                    raise line
                if line is _Mark.SETTLED:
                    break
                if isinstance(line, bytes):
                    yield line
                elif self._open_parts and not is_settling:
                    is_settling = True
                    tasks.append(asyncio.create_task(self._settle()))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _copy(self, part: str) -> None:
        mark = self._marks[part]
        try:
            async with aclosing(self._host.follow(part)) as log:
                async for line in log:
                    await self._queue.put((mark + line)[:MAX_LINE])
                    self._line_count += 1
        except HostError as error:
            await self._queue.put(error)
        else:
            self._open_parts.discard(part)
            await self._queue.put(_Mark.PART_ENDED)

    async def _settle(self) -> None:
        """Wait until the open logs are quiet."""
        quiet_looks = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_LIMIT_S):
                while quiet_looks < QUIET_LOOKS:
                    former_count = self._line_count
                    await asyncio.sleep(LOOK_PAUSE_S)
                    for part in sorted(self._open_parts):
                        # A lost machine has no last words.
                        with suppress(FitserveError):
                            await self._host.processes(part)
                    quiet_looks = quiet_looks + 1 if self._line_count == former_count else 0
        await self._queue.put(_Mark.SETTLED)
