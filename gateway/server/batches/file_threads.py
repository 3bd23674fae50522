"""Threads for files, apart from those of the control loop, so that a slow disk delays no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_THREADS = 4


class FileThreads:
    """Runs functions that block."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(_THREADS, "fitserve-batches")

    async def run(
        self,
        function: Callable[Parameters, Result],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Result:
        """Run a function. A caller that is cancelled waits for its end, so that no file is closed
        under a thread that writes."""
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work})
            if not work.cancelled():
                work.exception()  # otherwise asyncio logs it as never retrieved
            raise
