"""Watches an engine: reads its log, checks its health endpoint, and notes the proofs in both.

Never writes, never decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from gateway.controller.decisions.freeze_detector import FreezeDetector, longest_step_s
from gateway.controller.watch.engine_client import EngineClient, NoAnswerError
from gateway.controller.watch.engine_questions import is_alive, is_asleep, query_metrics
from gateway.diagnosis.compilers import COMPILATION, compiling
from gateway.diagnosis.lines.log_lines import clean
from gateway.diagnosis.log_reader import LogReader
from gateway.diagnosis.signatures import Signatures
from gateway.diagnosis.start_clock import StartClock
from gateway.domain import Attempt, EngineProcess, Failure, Observation
from gateway.domain.phases import PHASE_LABELS
from gateway.errors import FitserveError, HostError
from gateway.hosts.host import Host
from gateway.logging import Logger
from gateway.settings import Settings
from gateway.store.engine_logs import LogCopy, log_path
from gateway.supervision import SupervisedTask

log = Logger("fitserve.loop")

_TAIL_LINES = 200
PROBE_TIMEOUT_S = 5.0
_START_POLL_S = 0.5
# The same in the last phases before an engine listens: its first answer waits for the look.
_LAST_PHASES = ("kv", "graphs", "serving")
_LAST_POLL_S = 0.1
# Seconds between two looks at a serving engine that seems to be frozen.
_FREEZE_POLL_S = 1.0
# Seconds between two looks for compilers while an engine starts.
_COMPILERS_S = 2.0
# Seconds between the line that proves a failure and its report: the reasons follow that line.
_REASONS_S = 0.4
_CANARIES = 2
# Lines after which other tasks get a turn, so that a flood of lines does not stop the gateway.
_YIELD_LINES = 200


def start_poll_s(phase: str) -> float:
    """The seconds between two looks at an engine in this phase of its start."""
    return _LAST_POLL_S if phase in _LAST_PHASES else _START_POLL_S


class WatchContext(NamedTuple):
    """The surroundings of a watcher.

    `client` has the key of the engine. `silent_s` gives the seconds since an instance's last byte
    to clients; None: no client waits.
    """

    host: Host
    signatures: Signatures
    settings: Settings
    client: EngineClient
    wake: Callable[[], None]
    silent_s: Callable[[str], float | None] = lambda _: None


class Watcher:
    """Watches one attempt. `observation` and `tail` are the present knowledge; `wake` is called
    when they change."""

    def __init__(
        self,
        attempt: Attempt,
        name: str,
        url: str,
        context: WatchContext,
    ) -> None:
        self.attempt = attempt
        self.name = name
        self.url = url
        self.observation = Observation(is_verified=attempt.state == "ready")
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._host = context.host
        self._signatures = context.signatures
        self._reader = self._new_reader()
        self._report: asyncio.Task[None] | None = None
        self._description: asyncio.Future[Failure | None] | None = None
        """The description of a failure in a thread, while which the reader reads nothing."""
        self._questions: asyncio.Task[None] | None = None
        self.clock = StartClock(time.monotonic())
        self._settings = context.settings
        self.client = context.client
        self._wake = wake = context.wake
        self._silent_s = context.silent_s
        self._last_sign = self._answered_at = time.monotonic()
        self._silent_since: float | None = None
        self._compiles = ""
        self._freeze = FreezeDetector(self._answered_at, context.settings.silent_after_s)
        self._lines = 0  # lines of the log read so far, by any pass
        self._is_in_cluster = self._host.machines is not None
        self._copies_log = self._is_in_cluster or self._host.kind != "process"
        self._is_retired = False
        self._log_task = SupervisedTask(
            self._follow_log, "reading the log of an engine", wake, instance=name
        )
        self._look_tasks = (
            SupervisedTask(self._health, "the health checks of an engine", wake, instance=name),
            SupervisedTask(
                self._look_for_compilers,
                "the look at the compilers of an engine",
                wake,
                instance=name,
            ),
            SupervisedTask(self._work, "the look at the work of an engine", wake, instance=name),
        )

    @property
    def problems(self) -> Iterator[str]:
        """Problems that limit this watcher's view."""
        return (
            work.setback.problem
            for work in (self._log_task, *self._look_tasks)
            if work.setback.problem is not None
        )

    @property
    def cache_bytes(self) -> int | None:
        """Bytes for the KV cache by the engine's log."""
        return self._reader.progress.cache_bytes

    @property
    def has_pending_failure(self) -> bool:
        """Whether a failure in the log is not reported yet, as its reasons may follow."""
        return self._report is not None

    def update(self, **changes: object) -> None:
        """Change the observation and wake the loop."""
        self.observation = self.observation.evolve(**changes)
        self._wake()

    def record_proof_time(self, tokens: int, seconds: float) -> None:
        """Note how many seconds a prompt of this many tokens took."""
        self._freeze.step_s = longest_step_s(self.attempt.plan, tokens, seconds)

    def adopt_questions(self, questions: asyncio.Task[None]) -> None:
        """Own a task that goes on while the engine serves. The task ends with the watcher."""
        self._questions = questions

    def stop_questions(self) -> None:
        """End the task of the questions, if any."""
        if self._questions is not None:
            self._questions.cancel()

    def fail(self, failure: Failure) -> None:
        """Note a failure. The first one stands, as later ones are consequences."""
        if self.observation.proof is None:
            self.update(proof=failure)

    async def retire(self) -> bool:
        """Stop watching an engine that stops next. Returns whether the copy of its log goes on, to
        the last line or until `close`.

        Lines of other ranks, and those of the stop, come later than the proof of a failure.
        """
        self._is_retired = True
        if self._copies_log:
            await self._stop_tasks(self._look_tasks)
        else:
            await self.close()
        return not self._log_task.is_done

    async def close(self) -> None:
        await self._stop_tasks((self._log_task, *self._look_tasks))

    async def _stop_tasks(self, tasks: Iterable[SupervisedTask]) -> None:
        if self._report is not None:
            self._report.cancel()
            self._report = None
        self.stop_questions()
        for work in tasks:
            await work.close()

    def _new_reader(self) -> LogReader:
        reader = LogReader(self._signatures, str(self.attempt.plan.engine))
        # The log of a serving engine may be read from the middle, where users' words stand.
        if self.attempt.state == "ready":
            reader.mark_serving()
        return reader

    async def _follow_log(self) -> None:
        """Read the engine's log until its end, and copy it if the host keeps none."""
        if self._is_retired:
            # An error ended the copy. The log may be gone, so a new copy could be empty.
            return
        number = 0
        self._reader = self._new_reader()
        copy = None
        try:
            if self._copies_log:
                copy = LogCopy(
                    log_path(self._settings.data, self.name, is_in_cluster=self._is_in_cluster)
                )
            async with contextlib.aclosing(self._host.follow(self.name)) as lines:
                async for raw in lines:
                    number += 1
                    if copy is not None:
                        copy.write(raw)
                    await self._await_description()
                    if not self._is_retired:
                        self._read_line(raw, number)
                    if number % _YIELD_LINES == 0:
                        await asyncio.sleep(0)
            self._prove(await self._describe(lambda reader: reader.verdict))
        except (HostError, OSError) as error:
            self.tail.append(f"(the log could not be read: {error})")
        finally:
            if copy is not None:
                copy.close()
            self.update(has_log_ended=True)

    def _read_line(self, raw: bytes, number: int) -> None:
        """Read a line of the log. number: from 1, of this pass."""
        is_furthest = number >= self._lines
        self._lines = max(number, self._lines)
        self._read(raw)
        if is_furthest:
            # Reading has passed the place of the last error, so the error is over.
            self._log_task.setback.clear()

    def _read(self, raw: bytes) -> None:
        self._last_sign = time.monotonic()
        self.tail.append(clean(raw))
        self._reader.read(raw)
        is_open = self._report is None and self.observation.proof is None
        if is_open and self._reader.has_failure:
            self._report = asyncio.create_task(self._report_failure())
        readiness = {
            "is_kv_cache_made": self._reader.progress.is_kv_cache_made,
            "are_graphs_made": self._reader.progress.are_graphs_made,
        }
        if readiness != {name: getattr(self.observation, name) for name in readiness}:
            self.update(**readiness)
        self._show_phase()

    def _show_phase(self) -> None:
        """Show the phase by the log, or by the compilers while the log is silent."""
        if not self.observation.is_healthy:
            self.clock.enter(self._reader.progress.phase, time.monotonic())
        phase = self._compiles or PHASE_LABELS.get(self._reader.progress.phase)
        if (
            phase is not None
            and phase != self.observation.phase
            and not self.observation.is_healthy
        ):
            self.update(phase=phase)

    async def _look_for_compilers(self) -> float | None:
        """Look for compilers during the start. Returns the seconds until the next look."""
        if self.observation.is_healthy:
            self._compiles = ""
            return None
        former_phase = self._compiles
        self._compiles = compiling(process.command for process in await self._processes())
        if former_phase and not self._compiles and self.observation.phase.startswith(COMPILATION):
            self.update(phase=PHASE_LABELS.get(self._reader.progress.phase, "starting"))
        self._show_phase()
        return _COMPILERS_S

    async def _report_failure(self) -> None:
        try:
            # The reasons, and the lines of other ranks, follow immediately.
            await asyncio.sleep(_REASONS_S)
            # None if the engine has survived it after all.
            failure = await self._describe(lambda reader: reader.failure)
        except Exception as error:
            self._log_task.setback.record_failure(error)
        else:
            self._prove(failure)
        finally:
            self._report = None

    async def _describe(self, description: Callable[[LogReader], Failure | None]) -> Failure | None:
        """A failure with its message and cure, made in a thread. The reader reads nothing
        meanwhile.

        Without a known text it asks the checks and the history of the engine's code, which are read
        for that: some MB in tenths of a second.
        """
        await self._await_description()
        work = asyncio.ensure_future(asyncio.to_thread(description, self._reader))
        self._description = work
        work.add_done_callback(self._release_description)
        return await asyncio.shield(work)

    def _release_description(self, _: asyncio.Future[Failure | None]) -> None:
        self._description = None
        self._signatures.cures.release_checks()

    async def _await_description(self) -> None:
        """Wait until no thread reads the reader."""
        while self._description is not None:
            await asyncio.wait({self._description})

    def _prove(self, failure: Failure | None) -> None:
        if failure is not None:
            self.fail(failure)

    async def _health(self) -> float:
        """Look once. Returns the seconds until the next look."""
        is_serving = self.observation.is_verified and self.observation.is_healthy
        if is_serving:
            self._freeze.record_processes(time.monotonic(), await self._processes())
            self._judge_freeze()
        healthy = await self._is_healthy(self._probe_s if is_serving else PROBE_TIMEOUT_S)
        if healthy and not self.observation.is_healthy and self.attempt.plan.sleep_mode.value:
            # A previous gateway may have put it to sleep.
            self.observation = self.observation.evolve(
                is_sleeping=await is_asleep(self.client, self.url, PROBE_TIMEOUT_S)
            )
        now = time.monotonic()
        self._freeze.record_health(now, is_healthy=healthy)
        if healthy:
            self._record_answer(now)
        elif self.observation.is_healthy:
            self._record_silence(now)
        elif now - self._last_sign > self._settings.start_timeout_s:
            self._fail_start()
        if not self.observation.is_healthy:
            return start_poll_s(self._reader.progress.phase)
        if is_serving:
            self._judge_freeze()
        if healthy and not self._freeze.is_suspicious:
            return self._settings.health_interval_s
        return min(_FREEZE_POLL_S, self._settings.health_interval_s)

    def _record_answer(self, now: float) -> None:
        self._silent_since = None
        if not self.observation.is_healthy:
            self.clock.enter("serving", now)
            self.update(
                is_healthy=True,
                phase="verifying" if not self.observation.is_verified else "serving",
            )

    def _record_silence(self, now: float) -> None:
        self._silent_since = self._silent_since or now
        if now - self._silent_since > self._settings.hang_after_s:
            seconds = round(now - self._silent_since)
            self._report_hang(
                f"The engine answered no health check for {seconds} seconds, though its process"
                " lives."
            )

    def _fail_start(self) -> None:
        """End a start without any sign of life."""
        self.fail(
            Failure(
                kind="start_timeout",
                phase=self.observation.phase,
                message=(
                    f"The start printed nothing for {round(self._settings.start_timeout_s)}"
                    " seconds and does not answer."
                ),
                line=self.tail[-1] if self.tail else None,
                advice="Read the log; FITSERVE_START_TIMEOUT_S sets the longest wait.",
            )
        )

    @property
    def _probe_s(self) -> float:
        """The timeout of a health check of a serving engine, short enough to detect silence in
        time."""
        if self._freeze.is_suspicious:
            return _FREEZE_POLL_S
        return min(
            PROBE_TIMEOUT_S,
            max(_FREEZE_POLL_S, self._settings.silent_after_s - self._settings.health_interval_s),
        )

    async def _processes(self) -> tuple[EngineProcess, ...]:
        try:
            return await self._host.processes(self.name)
        except FitserveError:
            return ()

    async def _work(self) -> float:
        """Check whether the core works behind a server that answers. Returns the seconds until the
        next look."""
        waited_s = self._silent_s(self.name)
        is_silent = self._freeze.silent_seconds(time.monotonic()) > 0
        if (waited_s is None and not is_silent) or not self.observation.is_verified:
            return self._settings.health_interval_s
        self._freeze.record_metrics(
            time.monotonic(), await query_metrics(self.client, self.url, self._probe_s)
        )
        doubtful = not self.observation.freeze_reason and self._freeze.needs_probe(
            time.monotonic(), waited_s, self._probe_s
        )
        if is_silent or doubtful:
            asked_at = time.monotonic()
            lives = await is_alive(
                self.client, self.url, self.attempt.served_name, self.attempt.plan, self._probe_s
            )
            self._freeze.record_probe(asked_at, is_alive=lives)
            self._answered_at = time.monotonic() if lives else self._answered_at
            self._judge_freeze()
        if not self._freeze.silent_seconds(time.monotonic()):
            await self._progress()
        return min(_FREEZE_POLL_S, self._settings.health_interval_s)

    def _judge_freeze(self) -> None:
        """Note whether the engine is frozen. A frozen engine gets no requests until it answers
        again, or is replaced."""
        now = time.monotonic()
        freeze_reason = self._freeze.freeze_reason(now)
        if bool(freeze_reason) is not bool(self.observation.freeze_reason):
            log.warning(
                "frozen" if freeze_reason else "no longer frozen",
                instance=self.name,
                why=freeze_reason or self.observation.freeze_reason,
            )
            self.update(freeze_reason=freeze_reason)
        stopped_s = self._freeze.stopped_s(now)
        silent_seconds = self._freeze.silent_seconds(now)
        if stopped_s > self._settings.hang_after_s:
            self._report_hang(
                f"Processes of the engine were stopped for {round(stopped_s)} seconds, as by"
                " SIGSTOP or `docker pause`."
            )
        if silent_seconds > self._settings.hang_after_s:
            self._report_hang(
                f"For {round(silent_seconds)} seconds or more, {self._freeze.freeze_reason(now)}."
            )

    def _report_hang(self, message: str) -> None:
        phase = self.observation.phase
        self.fail(
            Failure(
                kind="hang",
                phase=phase,
                message=message,
                advice="The engine is replaced.",
                proven_subject="nothing",
            )
        )

    async def _is_healthy(self, within_s: float) -> bool:
        try:
            return (await self.client.get(f"{self.url}/health", within_s)).status == 200
        except NoAnswerError:
            return False

    async def _progress(self) -> None:
        """Detect a hang: clients wait, no token comes, and the smallest request has no answer
        either.

        A long prompt delays tokens too, but then the small request is answered.
        """
        patience_s = self._settings.hang_after_s
        engine_silent_s = self._silent_s(self.name)
        if (
            engine_silent_s is None
            or min(engine_silent_s, time.monotonic() - self._answered_at) < patience_s
        ):
            return
        for _ in range(_CANARIES):
            if await is_alive(
                self.client, self.url, self.attempt.served_name, self.attempt.plan, patience_s / 3
            ):
                self._answered_at = time.monotonic()
                return
            silent_s = self._silent_s(self.name)
            if silent_s is None or silent_s < patience_s:
                return
        self._report_hang(
            f"The engine gave no token for {round(engine_silent_s)} seconds and did not answer"
            f" {_CANARIES} requests for one token, though its health check is good."
        )
