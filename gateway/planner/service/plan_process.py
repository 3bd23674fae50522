"""Keeps the process that plans (plan_program.py), and asks it. The event loop never reads a model
folder, and reads little of an answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress
from pathlib import Path

from gateway.errors import (
    BadFlag,
    BadModel,
    BadRequest,
    Busy,
    FitserveError,
    NeedsRemoteCode,
    NoPlan,
    NotFound,
    SettingsError,
)
from gateway.logging import Logger
from gateway.planner.service.messages import (
    HEADER_BYTES,
    LENGTH,
    PROCESSOR_S,
    Answer,
    Frames,
    Request,
    Start,
    packed,
)
from gateway.worker_process import end, started

log = Logger("fitserve.planning")

# For one request, from the moment at which it is its turn. Headers of a thousand files at a far Hub
# come in a minute.
PATIENCE_S = 180.0
# Requests that may wait while one is answered.
WAITING = 8

_NICE = 10
# Between the end of a child's pipe and its own end.
_DYING_S = 2.0
_PROGRAM = "gateway.planner.service.plan_program"
_ERRORS = {
    error.__name__: error
    for error in (BadRequest, BadModel, NeedsRemoteCode, BadFlag, NotFound, NoPlan, SettingsError)
}


class PlanProcess:
    """One child that is kept for the next request; where it ended or was ended, the next request
    gets a new one."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def ask(self, source: str, request: Request) -> tuple[Answer, Frames]:
        """The answer. `source`: the model, for messages. Raises what the child says was wrong."""
        if self._waiting > WAITING:
            raise Busy(
                f"{WAITING} plans wait already for the one that is made.",
                hint="Ask again in a minute.",
                retry_after_s=30,
            )
        self._waiting += 1
        try:
            async with self._turn:
                answer, frames = await self._asked(source, request)
        finally:
            self._waiting -= 1
        if answer.error is not None:
            raise _error(source, answer.error)
        return answer, frames

    async def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await end(child)

    async def _asked(self, source: str, request: Request) -> tuple[Answer, Frames]:
        """Whatever comes between, a child whose answer was not read to its end is not asked
        again."""
        whole = False
        try:
            async with asyncio.timeout(PATIENCE_S):
                if self._child is None or self._child.returncode is not None:
                    self._child = await self._started()
                child = self._child
                assert child.stdin is not None  # noqa: S101
                child.stdin.write(packed(request))
                await child.stdin.drain()
                head, *rest = [await self._frame(child) for _ in range(1 + len(Frames._fields))]
            answer = Answer(*json.loads(head))
            whole = not answer.last
        except TimeoutError:
            raise BadModel(
                f"Reading {source[:200]} and planning it took longer than {PATIENCE_S:.0f}"
                " seconds.",
                hint="Look at the disk or the network that it is read from, then try again.",
            ) from None
        except (EOFError, ConnectionError):
            code = await self._ended()
            log.warning("the process that plans ended", source=source[:200], code=code)
            raise _death(source, code) from None
        finally:
            if not whole:
                await self.close()
        return answer, Frames(*rest)

    async def _started(self) -> asyncio.subprocess.Process:
        variables = {
            # Each arena of the allocator counts against the limit of memory, whatever is in it.
            "MALLOC_ARENA_MAX": "2",
            "HF_HOME": str(Path(self._start.data) / "hub"),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            # The library's warnings hold signed addresses.
            "HF_HUB_VERBOSITY": "error",
        }
        try:
            child = await started(_PROGRAM, variables)  # its settings come on stdin
        except OSError as error:
            raise Busy(
                f"The process that plans cannot be started: {error.strerror}.",
                hint=(
                    "The machine is short of memory, processes or descriptors; try again when"
                    " something ended."
                ),
                retry_after_s=30,
            ) from None
        with suppress(OSError):
            # From here, so that its start too comes after the streams.
            os.setpriority(os.PRIO_PROCESS, child.pid, _NICE)
        assert child.stdin is not None  # noqa: S101
        child.stdin.write(packed([json.dumps(self._start).encode()]))
        return child

    async def _frame(self, child: asyncio.subprocess.Process) -> bytes:
        assert child.stdout is not None  # noqa: S101
        (length,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
        if length > HEADER_BYTES:
            raise EOFError
        return await child.stdout.readexactly(length)

    async def _ended(self) -> int:
        """The code of a child that ended, or that said what no answer is."""
        child = self._child
        assert child is not None  # noqa: S101
        with suppress(TimeoutError):
            # Not killed at once: `kill` looks whether the child lives, and the code of a dead one
            # would be lost by that.
            async with asyncio.timeout(_DYING_S):
                return await child.wait()
        return await end(child)


def _error(source: str, told: dict[str, str | None]) -> FitserveError:
    kind = _ERRORS.get(told["class"] or "")
    if kind is not None:
        return kind(told["message"] or "", hint=told["hint"] or "", param=told["param"])
    log.error("planning broke", source=source[:200], error=told["message"], traceback=told["hint"])
    return FitserveError(
        f"Planning {source[:200]} broke: {told['message']}.",
        hint="That is a mistake of ours; the gateway's log has the details.",
    )


def _death(source: str, code: int) -> FitserveError:
    if code == -signal.SIGXCPU:
        return BadModel(
            f"Reading {source[:200]} and planning it took more than {PROCESSOR_S} seconds of"
            " processor time.",
            hint=(
                "A real model takes less than a tenth: look at config.json, the index and the"
                " headers of the weights."
            ),
        )
    words = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    return BadModel(
        f"The process that read {source[:200]} and planned it ended {words}.",
        hint=(
            "SIGKILL and SIGABRT are mostly a lack of memory; the gateway's log may say more. Try"
            " again."
        ),
    )
