"""Both result files of a running batch: results that come together share a write to the disk."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gateway.errors import QuotaReachedError
from gateway.logging import Logger
from gateway.server.batches.file_store import FileStore
from gateway.server.batches.file_threads import FileThreads
from gateway.server.batches.records import BatchRecord
from gateway.server.batches.result_file import ResultFile

log = Logger("fitserve.batches")

_DISK_RETRY_S = 5.0
# The most time that a gateway which stops waits for a slow disk.
_LAST_WRITES_S = 2.0


class LineResult(NamedTuple):
    """The result of a line. text: with its line break."""

    number: int
    text: bytes
    is_error: bool


class ResultWriter:
    """Writes results, and knows the lines that have one.

    marks: a byte for each line, 1 where its result is on the disk.
    answer_count, error_count: numbers of results in the two files.
    """

    def __init__(
        self,
        record: BatchRecord,
        store: FileStore,
        threads: FileThreads,
        on_full: Callable[[QuotaReachedError], object],
    ) -> None:
        """on_full: called where the quota has no room for more results."""
        self.marks = bytearray(record.total)
        self.answer_count = self.error_count = 0
        self._owner = record.owner
        self._store = store
        self._threads = threads
        self._on_full = on_full
        self._output, self._errors = (
            ResultFile(store.path(name), record.id) for name in (record.output_id, record.error_id)
        )
        self._names = record.output_id, record.error_id
        self._pending: list[tuple[LineResult, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Open both files, and mark the lines that have results. Blocks. Raises OSError."""
        self.answer_count = self._output.open(self.marks)
        self.error_count = self._errors.open(self.marks)
        for name, file in zip(self._names, (self._output, self._errors), strict=True):
            self._store.count_results(self._owner, name, file.size)

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of the output file and of the error file."""
        return self._output.size, self._errors.size

    async def add(self, result: LineResult) -> None:
        """Write a result. Returns once it is on the disk."""
        future = asyncio.get_running_loop().create_future()
        self._pending.append((result, future))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_pending())
        await future

    async def settle(self) -> None:
        """Wait for the results that are being written, whose lines may not wait any more."""
        while self._writing is not None:
            await asyncio.wait({self._writing})

    async def _write_pending(self) -> None:
        group: list[tuple[LineResult, asyncio.Future[None]]] = []
        try:
            while self._pending:
                group = self._pending
                self._pending = []
                if not await self._write([result for result, _ in group]):
                    return  # the batch ends, and with it the lines that wait
                for _, future in group:
                    if not future.done():
                        future.set_result(None)
        except Exception as error:
            for _, future in (*group, *self._pending):
                if not future.done():
                    future.set_exception(error)
            self._pending = []
        finally:
            self._writing = None

    async def _write(self, results: Sequence[LineResult]) -> bool:
        """Write results, as soon as the disk has room. Returns whether the quota had."""
        while True:
            try:
                await self._threads.run(self.write, results)
            except QuotaReachedError as error:
                if len(results) > 1:  # some of them may have room
                    for result in results:
                        if not await self._write([result]):
                            return False
                    return True
                self._on_full(error)
                return False
            except OSError as error:
                log.error(  # noqa: TRY400
                    "results of a batch cannot be written, and wait",
                    file=str(self._output.path),
                    error=str(error),
                )
                await asyncio.sleep(_DISK_RETRY_S)
            else:
                return True

    def write(self, results: Sequence[LineResult]) -> None:
        """Write results and mark their lines. Blocks. Raises QuotaReachedError, OSError."""
        for file, is_error in ((self._output, False), (self._errors, True)):
            part = [
                result
                for result in results
                if result.is_error is is_error and not self.marks[result.number]
            ]
            if not part:
                continue
            size = sum(len(result.text) for result in part)
            self._store.grow(self._owner, size)
            try:
                file.append([result.text for result in part])
            except OSError:
                self._store.shrink(self._owner, size)
                raise
            for result in part:
                self.marks[result.number] = 1
            if is_error:
                self.error_count += len(part)
            else:
                self.answer_count += len(part)

    async def close(self) -> None:
        """Close both files after results that are there already, and remove empty files. Results
        that a disk does not take within some seconds are lost."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WRITES_S):
                await self.settle()
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait({self._writing})
        await self._threads.run(self._close_files)

    def _close_files(self) -> None:
        for file in (self._output, self._errors):
            file.close()
            if not file.size:
                file.path.unlink(missing_ok=True)
