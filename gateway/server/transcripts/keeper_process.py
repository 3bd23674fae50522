"""The process that writes transcripts, as the gateway starts and watches it."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import msgspec

from gateway.controller.events.event_log import EventLog
from gateway.domain.facts import Event, EventKind
from gateway.logging import Logger
from gateway.server.transcripts.keeper_messages import KeeperReport, KeeperSetup
from gateway.supervision import SupervisedTask
from gateway.worker_process import kill, spawn

log = Logger("fitserve.transcripts")

_PROGRAM = "gateway.server.transcripts.keeper"
_RESTART_S = 1.0
# Seconds in which the process writes the last copies.
_LAST_COPIES_S = 5.0


class KeeperProcess:
    """Runs the process, and starts it again when it dies.

    problem: why nothing is written; empty: all is well.
    """

    def __init__(self, setup: KeeperSetup) -> None:
        self.problem = ""
        self._setup = setup
        self._ended_report = KeeperReport()
        self._report = KeeperReport()
        self._child: asyncio.subprocess.Process | None = None
        self._is_closing = False
        self._task: SupervisedTask | None = None
        self._events: EventLog

    def start(self, events: EventLog) -> None:
        self._events = events
        self._task = SupervisedTask(self._run, "writing transcripts")

    @property
    def written_count(self) -> int:
        return self._ended_report.written_count + self._report.written_count

    @property
    def dropped_count(self) -> int:
        return self._ended_report.dropped_count + self._report.dropped_count

    async def close(self) -> None:
        """End the process once it has written all copies, or after a time."""
        self._is_closing = True
        child = self._child
        if child is not None and child.stdin is not None:
            child.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_COPIES_S):
                    await child.wait()
        if self._task is not None:
            await self._task.close()
        if child is not None and child.returncode is None:
            await kill(child)

    async def _run(self) -> float | None:
        """Run the process until it ends. The seconds until the next one; None: there is none."""
        child = self._child = await spawn(_PROGRAM, {})
        assert child.stdin is not None  # noqa: S101 - pipes
        assert child.stdout is not None  # noqa: S101
        with suppress(OSError):
            child.stdin.write(msgspec.json.encode(self._setup) + b"\n")
            await child.stdin.drain()
        async for line in child.stdout:
            self._record_report(msgspec.json.decode(line, type=KeeperReport))
        code = await child.wait()
        self._ended_report = KeeperReport(self.written_count, self.dropped_count)
        self._report = KeeperReport()
        if self._is_closing:
            return None
        log.error("the keeper of transcripts has ended and is restarted", exit_code=code)
        return _RESTART_S

    def _record_report(self, report: KeeperReport) -> None:
        self._report = report
        if bool(report.problem) == bool(self.problem):
            return
        self.problem = report.problem
        kind: EventKind = "transcripts.stopped" if report.problem else "transcripts.resumed"
        words = (
            f"Transcripts are not written: {report.problem}. Requests go on. {report.cure}."
            if report.problem
            else "Transcripts are written again."
        )
        log.warning(words)
        self._events.append(
            [
                Event(
                    at=time.time(),
                    kind=kind,
                    words=words,
                    data={"dropped": self.dropped_count},
                )
            ]
        )
