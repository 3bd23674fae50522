"""Files of operators, read in bounded time: no pipe, device or hanging mount stops the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")

# A file system that answers at all answers in this time, also over a network.
PATIENCE_S = 20.0


def read_file(path: Path | str, most_bytes: int) -> bytes:
    """Up to `most_bytes` of a regular file. Raises OSError, also for a pipe, device or folder."""
    # Opening a pipe would otherwise wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    with os.fdopen(descriptor, "rb") as file:
        return file.read(most_bytes)


class FileReader(Generic[Result]):
    """Calls of one function outside the event loop. A call that hangs keeps neither the caller nor
    the end of the process waiting, and there is at most one."""

    def __init__(self, read: Callable[[], Result], patience_s: float = PATIENCE_S) -> None:
        self._read = read
        self._patience_s = patience_s
        self._call: asyncio.Future[Result] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a call runs, also one without a caller."""
        return self._call is not None and not self._call.done()

    async def result(self) -> Result:
        """The result of a call that began now, or earlier and hangs. Raises the errors of the
        function, and OSError after the time."""
        call = self._call
        if call is None:
            loop = asyncio.get_running_loop()
            call = self._call = loop.create_future()
            threading.Thread(target=self._run, args=(loop, call), daemon=True).start()
        finished, _ = await asyncio.wait({call}, timeout=self._patience_s)
        if not finished:
            raise OSError(errno.ETIMEDOUT, f"no answer of the file system in {self._patience_s} s")
        self._call = None
        return call.result()

    def _run(self, loop: asyncio.AbstractEventLoop, call: asyncio.Future[Result]) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = self._read()
        except BaseException as raised_error:  # raised again by the caller
            error = raised_error

        def finish() -> None:
            if call.done():
                return
            if error is None:
                call.set_result(result)
            else:
                call.set_exception(error)
                call.exception()  # seen: a caller that no longer waits misses nothing

        with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits
            loop.call_soon_threadsafe(finish)
