"""The watch of the data folder's lock: a gateway that lost its lock must end its loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from gateway.store.data_folder import has_lock
from gateway.supervision import SupervisedTask

_LOOK_S = 1.0


class LockWatch:
    """Calls `on_lost` once after another process has become the owner of the data folder."""

    def __init__(
        self,
        data: Path,
        descriptor: int,
        on_lost: Callable[[], Awaitable[object]],
        look_s: float = _LOOK_S,
    ) -> None:
        self._data = data
        self._descriptor = descriptor
        self._on_loss = on_lost
        self._look_s = look_s
        self._work = SupervisedTask(self._check_lock, "the watch of the data folder's lock")

    async def close(self) -> None:
        await self._work.close()

    async def _check_lock(self) -> float | None:
        if await asyncio.to_thread(has_lock, self._data, self._descriptor):
            return self._look_s
        await self._on_loss()
        return None
