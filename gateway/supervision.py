"""Work that must go on: an error that nobody expected is logged with its cause, is told, and the
work begins again after a while.

The while doubles with each error in a row, and is never the same twice, so that many works which
met one error do not all begin again at once.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from gateway.logging import Logger

log = Logger("fitserve.supervision")

FIRST_REST_S = 1.0
LONGEST_REST_S = 60.0
_SHOWN = 300


class Setback:
    """What an unexpected error does to one work: the work rests. `problem`: the error in words,
    None while all is well; `count`: of errors in a row."""

    def __init__(self, work: str, **about: object) -> None:
        """work, about: what is logged of the work."""
        self.problem: str | None = None
        self.count = 0
        self._work = work
        self._about = about
        self._until = 0.0

    @property
    def rest_s(self) -> float:
        """How long the work still rests; 0 when it may go on."""
        return max(0.0, self._until - time.monotonic())

    def broke(self, error: BaseException) -> None:
        """The work met `error`."""
        self.count += 1
        rest_s = min(LONGEST_REST_S, FIRST_REST_S * 2 ** min(self.count - 1, 16)) * random.uniform(  # noqa: S311
            0.75, 1.25
        )
        self._until = time.monotonic() + rest_s
        said = "".join(
            char if char.isprintable() else "\N{REPLACEMENT CHARACTER}"
            for char in str(error)[:_SHOWN]
        )
        self.problem = f"internal error: {type(error).__name__}: {said}"
        log.error(
            "unexpected error",
            work=self._work,
            **self._about,
            again_in_s=round(rest_s, 1),
            exc_info=error,
        )

    def over(self) -> None:
        """The work has gone well."""
        self.problem, self.count, self._until = None, 0, 0.0


class Supervised:
    """A task that repeats a step, whatever errors the step raises. `setback` tells of them."""

    def __init__(
        self,
        step: Callable[[], Awaitable[float | None]],
        work: str,
        changed: Callable[[], object] = lambda: None,
        **about: object,
    ) -> None:
        """step: gives the seconds until it is wanted again, None when its work is done. changed:
        called when an error comes. work, about: as
        for `Setback`."""
        self.setback = Setback(work, **about)
        self._step = step
        self._changed = changed
        self._task = asyncio.create_task(self._run())

    @property
    def done(self) -> bool:
        return self._task.done()

    async def close(self) -> None:
        """Ends the work where it is. Raises nothing of what the work meets then."""
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()  # else asyncio logs it once the task is collected

    async def _run(self) -> None:
        while True:
            try:
                pause_s = await self._step()
                self.setback.over()
            except (Exception, asyncio.CancelledError) as error:
                # A step may raise CancelledError though nobody ends this work: something that it
                # waited for was cancelled.
                if self._task.cancelling():
                    raise
                self.setback.broke(error)
                pause_s = self.setback.rest_s
                self._changed()
            # A step may also go on to its end though this work is ended: something in it took the
            # cancellation for its own.
            if pause_s is None or self._task.cancelling():
                return
            await asyncio.sleep(pause_s)
