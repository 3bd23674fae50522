"""Work that restarts after unexpected errors, which are logged and reported.

The rest before a restart doubles with each error in a row. A random part prevents that many tasks
with the same error restart immediately.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from gateway.logging import Logger

log = Logger("fitserve.supervision")

FIRST_REST_S = 1.0
MAX_REST_S = 60.0
_EXCERPT_CHARACTERS = 300


class ErrorBackoff:
    """The rest of a work after unexpected errors.

    problem: the last error in words; None while the work is well.
    count: the number of errors in a row.
    """

    def __init__(self, work: str, **subject: object) -> None:
        """Begin without a setback. work, subject: fields for the log."""
        self.problem: str | None = None
        self.count = 0
        self._work = work
        self._subject = subject
        self._retry_at = 0.0

    @property
    def rest_s(self) -> float:
        """The seconds that the work still rests; 0 when it may go on."""
        return max(0.0, self._retry_at - time.monotonic())

    def record_failure(self, error: BaseException) -> None:
        """Rest, and log the error of the work."""
        self.count += 1
        rest_s = min(MAX_REST_S, FIRST_REST_S * 2 ** min(self.count - 1, 16))
        rest_s *= random.uniform(0.75, 1.25)  # noqa: S311
        self._retry_at = time.monotonic() + rest_s
        message = "".join(
            char if char.isprintable() else "\N{REPLACEMENT CHARACTER}"
            for char in str(error)[:_EXCERPT_CHARACTERS]
        )
        self.problem = f"internal error: {type(error).__name__}: {message}"
        log.error(
            "unexpected error",
            work=self._work,
            **self._subject,
            again_in_s=round(rest_s, 1),
            exc_info=error,
        )

    def clear(self) -> None:
        """Note that the work succeeded."""
        self.problem = None
        self.count = 0
        self._retry_at = 0.0


class SupervisedTask:
    """A task that repeats a step, also after errors, which `setback` reports."""

    def __init__(
        self,
        step: Callable[[], Awaitable[float | None]],
        work: str,
        on_change: Callable[[], object] = lambda: None,
        **subject: object,
    ) -> None:
        """Begin to repeat `step`.

        step: returns the seconds until its next run; None: the work is done.
        on_change: called after an error.
        work, subject: the parameters of `ErrorBackoff`.
        """
        self.setback = ErrorBackoff(work, **subject)
        self._step = step
        self._on_change = on_change
        self._task = asyncio.create_task(self._run())

    @property
    def is_done(self) -> bool:
        return self._task.done()

    async def close(self) -> None:
        """End the work immediately. Errors of the work are not raised here."""
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()  # else asyncio logs it once the task is collected

    async def _run(self) -> None:
        while True:
            try:
                pause_s = await self._step()
                self.setback.clear()
            except (Exception, asyncio.CancelledError) as error:
                # A step can raise CancelledError though nobody ends this work, because it waited
                # for a task that was cancelled.
                if self._task.cancelling():
                    raise
                self.setback.record_failure(error)
                pause_s = self.setback.rest_s
                self._on_change()
            # A step can also run to its end though this work is ended, because a part of it
            # swallowed the cancellation.
            if pause_s is None or self._task.cancelling():
                return
            await asyncio.sleep(pause_s)
