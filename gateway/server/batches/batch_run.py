"""The run of one batch, from the check of its input to its result files.

    validating   every line is checked; wrong lines end the batch (failed)
    in_progress  lines are sent, and results written, until every line has one
    finalizing   the result files become files of the key
    cancelling   the lines without a result get one that says so

A run begins again after a crash: its result files say which lines are answered. So no answered line
is asked again, and no line is lost. The lines of a batch that expires get results too. A batch
whose key is revoked ends immediately.

A line that has to wait, such as for a budget, leaves its place and the memory. Its batch reads no
further until the pause is over, and then reads such lines again. So no batch holds up others.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Literal

from gateway.errors import (
    Conflict,
    FitserveError,
    NotReady,
    QuotaReachedError,
    UpstreamError,
    short_reason,
)
from gateway.logging import Logger
from gateway.proxy.access.auth import Key
from gateway.secret import Secret
from gateway.server.batches.batch_input import (
    InputLimits,
    InputLine,
    InputProblem,
    InputReport,
    InputStart,
    check_input,
    input_lines,
)
from gateway.server.batches.file_store import FileStore
from gateway.server.batches.file_threads import FileThreads
from gateway.server.batches.line_client import LineClient, LineReply
from gateway.server.batches.line_places import LinePlace, LinePlaces
from gateway.server.batches.line_step import next_step, pause_s
from gateway.server.batches.reading_turns import ReadingTurns
from gateway.server.batches.records import (
    BatchError,
    BatchRecord,
    BatchStatus,
    FileRecord,
)
from gateway.server.batches.result_file import (
    answer_result,
    failure_result,
    plain_json,
    result_id,
)
from gateway.server.batches.result_writer import LineResult, ResultWriter

log = Logger("fitserve.batches")

Cause = Literal["cancelled", "expired", "failed"]
# Lines that are read ahead, and their bytes.
_AHEAD_LINES = 256
_AHEAD_BYTES = 1024 * 1024
_REST_LINES = 1000
# Larger answers are read in a thread.
_LARGE_BYTES = 256 * 1024
_DISK_RETRY_S = 5.0
# The clock may be set, so the end of a batch is checked again after this time.
_CLOCK_LOOK_S = 60.0
_NO_MODEL = 404
_REST_ERRORS: dict[Cause, tuple[str, str]] = {
    "cancelled": ("batch_cancelled", "The batch was cancelled before this line was answered."),
    "expired": ("batch_expired", "The time of the batch was over before this line was answered."),
}


@dataclass(frozen=True, slots=True)
class RunParts:
    """Parts that all batches share.

    key_of: the valid key of an owner.
    token_of: a token that stands for a key, None for a gateway without keys.
    model_problem: the reason why a model cannot answer at a path; empty: it can.
    """

    store: FileStore
    threads: FileThreads
    client: LineClient
    places: LinePlaces
    turns: ReadingTurns
    limits: InputLimits
    key_of: Callable[[str], Key | None]
    token_of: Callable[[Key], Secret | None]
    model_problem: Callable[[Key, str, str], str]


class BatchRun:
    """One run of a batch. record: its present state."""

    def __init__(self, record: BatchRecord, parts: RunParts) -> None:
        self.record = record
        self._parts = parts
        self._lock = asyncio.Lock()
        self._halt = asyncio.Event()
        self._cause: Cause | None = "cancelled" if record.status == "cancelling" else None
        self._errors: tuple[BatchError, ...] = ()
        self._writer: ResultWriter
        self._last_start = InputStart()
        self._open_offsets: dict[int, int] = {}  # lines sent, without a result
        self._sent_lines: set[int] = set()
        self._failures: Counter[int] = Counter()  # tries of a line that failed
        self._pauses = 0  # since the last result
        self._pause_s: float | None = None  # the pause that a line asks for
        self._change = asyncio.Event()  # a sent line has a result, or has to wait

    # --- called by others ---

    async def cancel(self) -> BatchRecord:
        """Cancel the batch; the record then. Raises Conflict, NotReady, OSError."""
        async with self._lock:
            if self.record.status in ("validating", "in_progress"):
                await self._save(self._next_record("cancelling"))
                self._stop_run("cancelled")
            elif self.record.status != "cancelling":
                raise ended_error(self.record)
        return self.record

    def review(self) -> None:
        """End the batch where its key may not send requests any more."""
        if self._parts.key_of(self.record.owner) is None:
            message = f"The key '{self.record.key_name}' was revoked, or has ended."
            self._stop_run("failed", BatchError(code="key_revoked", message=message))

    async def run(self) -> None:
        """Run the batch to its end. A cancelled run is continued by a later one."""
        self.review()
        if self.record.status == "validating" and self._cause is None and not await self._check():
            return
        writer = self._writer = ResultWriter(
            self.record, self._parts.store, self._parts.threads, self._record_full_quota
        )
        try:
            await self._parts.threads.run(writer.open)
            self._show_counts()
            if self._cause is None:
                await self._answer_lines()
            await writer.settle()
            if self._cause in _REST_ERRORS:
                await self._parts.threads.run(self._write_rest)
            await self._finish()
        finally:
            await writer.close()

    # --- states ---

    def _stop_run(self, cause: Cause, *errors: BatchError) -> None:
        if self._cause is None:
            self._cause = cause
            self._errors = errors
        self._halt.set()

    def _record_full_quota(self, error: QuotaReachedError) -> None:
        self._stop_run("failed", BatchError(code=error.code, message=str(error)))

    def _next_record(self, status: BatchStatus, **changes: object) -> BatchRecord:
        times = {**self.record.times, status: time.time()}
        return self.record.evolve(status=status, times=times, **changes)

    async def _save(self, record: BatchRecord) -> None:
        await self._parts.threads.run(self._parts.store.save_batch, record)
        self.record = record
        self._parts.store.record_batch(record)  # lines may have shown the former state meanwhile

    async def _enter(self, status: BatchStatus, **changes: object) -> None:
        """Enter a state, as soon as the disk has room for it."""

        async def save_state() -> None:
            async with self._lock:
                if status == "in_progress" and self.record.status != "validating":
                    return  # cancelled meanwhile
                await self._save(self._next_record(status, **changes))

        await self._write_for_certain(
            save_state, "the state of a batch cannot be written, and waits"
        )

    async def _write_for_certain(self, write: Callable[[], Awaitable[None]], log_text: str) -> None:
        """Write until the disk has taken it. log_text: the words of the log meanwhile."""
        while True:
            try:
                await write()
            except NotReady:
                await asyncio.Future()  # the gateway stops, and cancels this run
            except OSError as error:
                log.error(log_text, batch=self.record.id, error=str(error))  # noqa: TRY400
                await asyncio.sleep(_DISK_RETRY_S)
            else:
                return

    def _show_counts(self) -> None:
        writer = self._writer
        self.record = self.record.evolve(completed=writer.answer_count, failed=writer.error_count)
        self._parts.store.record_batch(self.record)

    # --- validating ---

    async def _check(self) -> bool:
        """Check the input. Returns whether the batch may go on."""
        parts = self._parts
        record = self.record
        key = parts.key_of(record.owner)
        if key is None:
            return True  # the run ends by its cause

        def problem(model: str) -> str:
            return parts.model_problem(key, record.endpoint, model)

        path = parts.store.path(record.input_file_id)
        try:
            report = await parts.threads.run(
                check_input, path, record.endpoint, parts.limits, problem
            )
        except OSError as error:
            report = InputReport(0, (_input_error(error),))
        if report.errors:
            await self._enter("failed", errors=report.errors)
            log.info("a batch has wrong lines", batch=record.id, key=record.key_name)
            return False
        await self._enter("in_progress", total=report.total)
        if self._cause == "cancelled":
            self.record = self.record.evolve(total=report.total)
        return True

    # --- in_progress ---

    async def _answer_lines(self) -> None:
        """Send the lines without a result, until all have one or the batch has another end."""
        feeding = asyncio.create_task(self._feed())
        halting = asyncio.create_task(self._halt.wait())
        try:
            while not feeding.done() and self._cause is None:
                rest_s = self.record.expires_at - time.time()
                if rest_s <= 0:
                    self._stop_run("expired")
                    break
                await asyncio.wait(
                    {feeding, halting},
                    timeout=min(rest_s, _CLOCK_LOOK_S),
                    return_when=asyncio.FIRST_COMPLETED,
                )
        finally:
            halting.cancel()
            was_done = feeding.done()
            feeding.cancel()
            await asyncio.wait({feeding, halting})
            self._sent_lines.clear()
        if was_done:
            feeding.result()

    async def _feed(self) -> None:
        """Send lines in rounds, until all have results. A round ends where a line has to wait."""
        record = self.record
        async with asyncio.TaskGroup() as group:
            while self._cause is None:
                async with self._parts.turns.turn(record.owner, record.made_at):
                    await self._send_lines(group)
                while self._pause_s is None and self._sent_lines:
                    self._change.clear()
                    await self._change.wait()
                if self._pause_s is not None:
                    await asyncio.sleep(self._pause_s)
                    self._pause_s = None
                elif not self._open_offsets:
                    return

    async def _send_lines(self, group: asyncio.TaskGroup) -> None:
        """Send lines until one has to wait."""
        places = self._parts.places
        async with aclosing(self._lines()) as lines:
            async for line in lines:
                place = LinePlace(self.record.owner, line.model, len(line.body))
                await places.wait(place)
                if self._pause_s is not None:
                    return
                places.acquire(place)
                self._record_start(line)
                task = group.create_task(self._answer(line))
                # A task that is cancelled before its first step runs no line of its function.
                task.add_done_callback(partial(self._record_end, line.number, place))

    def _record_start(self, line: InputLine) -> None:
        self._last_start = max(self._last_start, InputStart(line.number, line.offset))
        self._open_offsets[line.number] = line.offset
        self._sent_lines.add(line.number)

    def _record_end(self, number: int, place: LinePlace, _: object) -> None:
        self._parts.places.release(place)
        self._sent_lines.discard(number)
        self._change.set()

    async def _lines(self) -> AsyncGenerator[InputLine, None]:
        """The lines without a result, read in threads."""
        lines = self._rest()
        while True:
            try:
                group = await self._parts.threads.run(_read_ahead, lines)
            except (OSError, InputProblem) as error:
                self._stop_run("failed", _input_error(error))
                return
            if not group:
                return
            for line in group:
                yield line

    def _rest(self) -> Iterator[InputLine]:
        """The lines without a result that are not sent now. Blocks."""
        parts = self._parts
        record = self.record
        path = parts.store.path(record.input_file_id)
        marks = self._writer.marks
        sent_lines = self._sent_lines

        def is_done(number: int) -> bool:
            # The order matters: a line has its mark before it leaves the lines that were sent.
            return number in sent_lines or bool(marks[number])

        # All lines before the first open one have results.
        start = min(map(InputStart._make, self._open_offsets.items()), default=self._last_start)
        return input_lines(path, record.endpoint, parts.limits, start, is_done)

    async def _answer(self, line: InputLine) -> None:
        result = await self._result(line)
        if result is None:
            return
        await self._writer.add(result)
        self._failures.pop(line.number, None)
        self._open_offsets.pop(line.number, None)
        self._pauses = 0
        self._show_counts()

    async def _result(self, line: InputLine) -> LineResult | None:
        """The result of a line after few tries; None: the line has to wait."""
        while True:
            answer, reason = await self._send(line)
            body = None if answer is None else await self._plain_body(answer.body)
            status, code = (answer.status, answer.error_code) if answer else (None, "")
            failures = self._failures[line.number]
            step = next_step(status, code, failures, is_json=body is not None)
            if status == _NO_MODEL and not self._lacks_model(line.model):
                step = "wait"  # a worker that has begun knows all models shortly
            if step in ("answer", "error"):
                id_ = result_id(self.record.id, line.number)
                text = (
                    failure_result(id_, line.custom_id, "engine_error", reason)
                    if answer is None or body is None
                    else answer_result(id_, line.custom_id, answer.status, answer.request_id, body)
                )
                return LineResult(line.number, text, is_error=step == "error")
            self.review()
            retry_after_s = answer.retry_after_s if answer else None
            if step == "wait":
                self._delay(pause_s(self._pauses, retry_after_s))
                return None
            self._failures[line.number] += 1
            await asyncio.sleep(pause_s(failures, retry_after_s))

    def _delay(self, seconds: float) -> None:
        """Read no further lines until a pause is over."""
        if self._pause_s is None:
            self._pauses += 1
        self._pause_s = max(self._pause_s or 0, seconds)

    def _lacks_model(self, model: str) -> bool:
        key = self._parts.key_of(self.record.owner)
        return key is None or bool(self._parts.model_problem(key, self.record.endpoint, model))

    async def _send(self, line: InputLine) -> tuple[LineReply | None, str]:
        """The answer to a line, and the reason of none."""
        key = self._parts.key_of(self.record.owner)
        if key is None:
            self.review()
            await asyncio.Future()  # cancelled with the run
            raise AssertionError
        try:
            token = self._parts.token_of(key)
            answer = await self._parts.client.send(self.record.endpoint, line.body, token)
        except NotReady as error:
            return LineReply(error.status, "", b""), str(error)
        except (OSError, UpstreamError) as error:
            return None, str(error)
        return answer, f"The answer of status {answer.status} is not JSON."

    async def _plain_body(self, body: bytes) -> bytes | None:
        """The body of an answer on one line; None: it is not JSON."""
        if len(body) > _LARGE_BYTES:
            return await self._parts.threads.run(plain_json, body)
        return plain_json(body)

    # --- the end ---

    def _write_rest(self) -> None:
        """Give each line without a result one that tells the end of the batch. Blocks."""
        if self._cause is None or not self.record.total:
            return
        code, message = _REST_ERRORS[self._cause]
        results: list[LineResult] = []
        try:
            for line in self._rest():
                id_ = result_id(self.record.id, line.number)
                text = failure_result(id_, line.custom_id, code, message)
                results.append(LineResult(line.number, text, is_error=True))
                if len(results) == _REST_LINES:
                    self._writer.write(results)
                    results = []
            self._writer.write(results)
        except (QuotaReachedError, OSError, InputProblem) as error:
            log.warning(
                "lines of a batch that has ended get no result",
                batch=self.record.id,
                reason=str(error),
            )

    async def _finish(self) -> None:
        """Make the result files files of the key, and end the batch."""
        self._show_counts()
        if self._cause is None:
            await self._enter("finalizing")
        await self._write_for_certain(
            partial(self._parts.threads.run, self._store_results),
            "results of a batch cannot be kept, and wait",
        )
        output_bytes, error_bytes = self._writer.sizes
        await self._enter(
            self._cause or "completed",
            errors=self._errors,
            output_bytes=output_bytes,
            error_bytes=error_bytes,
        )
        log.info(
            "a batch has ended",
            batch=self.record.id,
            key=self.record.key_name,
            status=self.record.status,
            completed=self.record.completed,
            failed=self.record.failed,
        )

    def _store_results(self) -> None:
        record = self.record
        now = time.time()
        for id_, size, kind in zip(
            (record.output_id, record.error_id),
            self._writer.sizes,
            ("output", "error"),
            strict=True,
        ):
            if size:
                self._parts.store.save_file(
                    FileRecord(
                        id=id_,
                        owner=record.owner,
                        filename=f"{record.id}_{kind}.jsonl",
                        purpose="batch_output",
                        bytes=size,
                        made_at=now,
                        expires_at=now + record.output_s,
                    )
                )


def _read_ahead(lines: Iterator[InputLine]) -> list[InputLine]:
    """The next lines, few enough for memory. Blocks."""
    group: list[InputLine] = []
    size = 0
    for line in lines:
        group.append(line)
        size += len(line.body)
        if len(group) >= _AHEAD_LINES or size >= _AHEAD_BYTES:
            break
    return group


def _input_error(error: Exception) -> BatchError:
    """The error of a batch whose input can be read no more, without paths of the gateway."""
    message = f"The input cannot be read: {short_reason(error)}."
    return BatchError(code="input_unreadable", message=message)


def ended_error(record: BatchRecord) -> FitserveError:
    """The error for a batch that cannot be cancelled any more."""
    return Conflict(
        f"The batch {record.id} is {record.status} and cannot be cancelled.",
        hint="Its results are in its output file and its error file.",
    )
