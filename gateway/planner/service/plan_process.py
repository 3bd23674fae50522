"""The gateway's end of the plan process (plan_program.py).

The event loop never reads a model folder, and reads little of an answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gateway.domain.plan_request import PlanRequest, PlanResult
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
    ANSWER_FRAMES,
    HEADER_BYTES,
    LENGTH,
    PROCESSOR_S,
    PlanAnswer,
    WorkerConfig,
    pack,
    read_result,
    request_frames,
)
from gateway.worker_process import kill, spawn

log = Logger("fitserve.planning")

# The limit of one request, without its wait. Headers of a thousand files at a far Hub come in a
# minute.
PATIENCE_S = 180.0
# Requests that may wait before a preview is refused.
MAX_WAITING_PLANS = 8

_NICE = 10
# Between the end of a child's pipe and its own end.
_EXIT_TIMEOUT_S = 2.0
_PROGRAM = "gateway.planner.service.plan_program"
_ERRORS = {
    error.__name__: error
    for error in (BadRequest, BadModel, NeedsRemoteCode, BadFlag, NotFound, NoPlan, SettingsError)
}


class PlanProcess:
    """The child process that plans. A new one starts after its end."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        """The settings of the next child. A child with former ones answers no further request."""
        self._child: asyncio.subprocess.Process | None = None
        self._child_config = config
        self._turn = asyncio.Lock()
        self._waiting_count = 0

    async def request_plan(
        self, request: PlanRequest, facts: Sequence[str], *, may_wait: bool = True
    ) -> PlanResult:
        """The result. facts: JSON of each.

        may_wait: however many requests are queued. Raises the child's error, BadModel, or Busy.
        """
        source = request.wish.source or ""
        if self._waiting_count > MAX_WAITING_PLANS and not may_wait:
            raise Busy(
                f"The planner is busy: {MAX_WAITING_PLANS} requests are queued.",
                hint="Try again in a minute.",
                retry_after_s=30,
            )
        self._waiting_count += 1
        try:
            async with self._turn:
                answer, frames = await self._exchange(source, pack(request_frames(request, facts)))
        finally:
            self._waiting_count -= 1
        if answer.error is not None:
            raise planning_error(source, answer.error)
        return read_result(frames)

    async def close(self) -> None:
        """End the child."""
        child = self._child
        self._child = None
        if child is not None:
            await kill(child)

    async def _exchange(self, source: str, message: bytes) -> tuple[PlanAnswer, list[bytes]]:
        """Send the message and read the answer. A child whose answer was cut off is ended."""
        is_whole = False
        try:
            async with asyncio.timeout(PATIENCE_S):
                if self._child_config is not self.config:
                    await self.close()
                if self._child is None or self._child.returncode is not None:
                    self._child_config = self.config
                    self._child = await start_child(_PROGRAM, self.config)
                child = self._child
                assert child.stdin is not None  # noqa: S101
                child.stdin.write(message)
                await child.stdin.drain()
                head, *tail_frames = [await read_frame(child) for _ in range(ANSWER_FRAMES)]
            answer = PlanAnswer(*json.loads(head))
            is_whole = not answer.last
        except TimeoutError:
            raise BadModel(
                f"Reading {source[:200]} and planning it took longer than {PATIENCE_S:.0f}"
                " seconds.",
                hint="Check the disk or network that the model is read from, then try again.",
            ) from None
        except (EOFError, ConnectionError):
            code = await self._exit_code()
            log.warning("the process that plans ended", source=source[:200], code=code)
            raise _death_error(source, code) from None
        finally:
            if not is_whole:
                await self.close()
        return answer, tail_frames

    async def _exit_code(self) -> int | None:
        """The exit code of a child that ended, or sent something else than an answer.

        None: as in `kill`.
        """
        child = self._child
        self._child = None
        assert child is not None  # noqa: S101
        with suppress(TimeoutError):
            # The child is not killed immediately: `kill` looks for a living child, and would lose
            # the code of a dead one.
            async with asyncio.timeout(_EXIT_TIMEOUT_S):
                return await child.wait()
        return await kill(child)


async def start_child(program: str, config: WorkerConfig) -> asyncio.subprocess.Process:
    """A process that plans, with its settings as the first message. Raises Busy."""
    variables = {
        # Each arena of the allocator counts against the limit of memory, even an empty one.
        "MALLOC_ARENA_MAX": "2",
        "HF_HOME": str(Path(config.data) / "hub"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        # The library's warnings hold signed addresses.
        "HF_HUB_VERBOSITY": "error",
    }
    try:
        child = await spawn(program, variables)  # its settings come on stdin
    except OSError as error:
        raise Busy(
            f"The process that plans cannot be started: {error.strerror}.",
            hint=(
                "The machine is short of memory, processes or file descriptors. Free some, then"
                " try again."
            ),
            retry_after_s=30,
        ) from None
    with suppress(OSError):
        # Set here, so that streams go before its start too.
        os.setpriority(os.PRIO_PROCESS, child.pid, _NICE)
    assert child.stdin is not None  # noqa: S101
    child.stdin.write(pack([config.frame]))
    return child


async def read_frame(child: asyncio.subprocess.Process) -> bytes:
    """The next frame of a child's answer. Raises EOFError."""
    assert child.stdout is not None  # noqa: S101
    (length,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
    if length > HEADER_BYTES:
        raise EOFError
    return await child.stdout.readexactly(length)


def planning_error(source: str, fields: dict[str, str | None]) -> FitserveError:
    """The error that a child reported. source: of the model, for messages."""
    kind = _ERRORS.get(fields["class"] or "")
    if kind is not None:
        return kind(fields["message"] or "", hint=fields["hint"] or "", param=fields["param"])
    log.error(
        "planning broke", source=source[:200], error=fields["message"], traceback=fields["hint"]
    )
    return FitserveError(
        f"The planner failed at {source[:200]}: {fields['message']}.",
        hint="This is a bug in fitserve. Report it with the details in the gateway's log.",
    )


def _death_error(source: str, code: int | None) -> FitserveError:
    """The error for a request whose process ended."""
    if code == -signal.SIGXCPU:
        return BadModel(
            f"Reading {source[:200]} and planning it took more than {PROCESSOR_S} seconds of"
            " processor time.",
            hint=(
                "A real model takes less than a tenth: look at config.json, the index and the"
                " headers of the weights."
            ),
        )
    if code is None:
        return BadModel(
            f"The planning process neither answers nor ends while it works on {source[:200]}.",
            hint="Check the disk or network that the model is read from, then try again.",
        )
    text = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    return BadModel(
        f"The planning process ended {text} while it worked on {source[:200]}.",
        hint=(
            "SIGKILL and SIGABRT usually mean out of memory; the gateway's log may say more. Try"
            " again."
        ),
    )
