"""More than one core: the workers of a gateway, as the control process sees them.

The control process owns the state: the loop, the store, the admin API. Workers own the connections.
Each has a listening socket of its own on the one port (SO_REUSEPORT), so the kernel spreads
connections by their addresses, evenly whether or not the workers are idle; of one shared socket,
whoever wakes first would take them all, and keep them. The control process holds the sockets too:
what comes for a worker that has died waits for its successor.

    a worker dies            its streams end; it is started again, at once or, when it dies young, after a while that doubles
    a worker hangs           it reports nothing for HUNG_S and is killed
    the control process dies the workers go on; the next gateway on the data folder ends them
    (`gateway.proxy.workers.orphaned_workers`)
    SIGTERM                  all workers finish what they are answering, within the grace time
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from gateway.logging import Logger
from gateway.proxy.access.auth import Keys
from gateway.proxy.limits import Limits
from gateway.proxy.metrics.counters import METRICS, Sample
from gateway.proxy.metrics.usage_counter import UsageCounter
from gateway.proxy.routing.in_flight import RequestsInFlight, together
from gateway.proxy.routing.routes import Routes
from gateway.proxy.routing.table import RouteTable
from gateway.proxy.shared_memory import SharedMemory
from gateway.proxy.workers.channel import (
    REPORT_S,
    Begin,
    Channel,
    Elsewhere,
    Leave,
    ReplicaLoad,
    Report,
    RequestsAsked,
    RequestsTold,
    RouteTableMessage,
    ToWorker,
    keys_of,
    table_of,
)
from gateway.proxy.workers.shared_limits import LimitRows
from gateway.settings import Settings
from gateway.supervision import Supervised

log = Logger("fitserve.workers")

HUNG_S = 30.0
# A worker answers at once; one that does not hangs, or has no time.
_ANSWERS_S = 1.0
# A worker that lived for less time died at once.
_YOUNG_S = 3.0
_BACKOFF_S = 0.05
_BACKOFF_MAX_S = 10.0
# Metrics of a worker that remain after its end.
_LASTING = frozenset(metric.name for metric in METRICS if metric.kind != "gauge")


@dataclass(eq=False)
class _Worker:
    """One that runs."""

    index: int
    process: asyncio.subprocess.Process
    channel: Channel
    heard: float
    silent_looks: int = 0  # since it was heard
    reported: bool = False
    loads: dict[str, ReplicaLoad] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    elsewhere: dict[str, int] | None = None  # as it was told
    told: int = 0  # tables of routes
    tables: int = 0  # that it has taken over
    waiting: dict[str, float] = field(
        default_factory=dict
    )  # by model, since when, of the clock of this process
    asked: deque[asyncio.Future[RequestsTold]] = field(
        default_factory=deque
    )  # who waits for `RequestsTold`


class PublishedRoutes(Routes):
    """The loop's view: a new table goes to all workers, and what they have in flight is known from
    their reports."""

    def __init__(self, workers: Workers) -> None:
        super().__init__()
        self._workers = workers

    @property
    def table(self) -> RouteTable:
        return self._table

    @table.setter
    def table(self, table: RouteTable) -> None:
        self._table = table
        self._workers.tell(table_of(table))

    def silent_s(self, replica_id: str) -> float | None:
        return self._workers.silent_s(replica_id)

    def in_flight(self, replica_id: str) -> int:
        return self._workers.in_flight(replica_id)

    def demand(self) -> dict[str, float]:
        return self._workers.demand()

    def drained(self, replica_id: str) -> bool:
        return super().drained(replica_id) and self._workers.know_the_table


class Workers:
    """`routes` are for the loop."""

    def __init__(
        self,
        settings: Settings,
        limits: Limits,
        keys: Keys,
        memory: SharedMemory,
        listeners: list[list[socket.socket]],
        control: Path,
        usage: UsageCounter,
    ) -> None:
        """limits: of the whole gateway; memory: what all of them know; listeners: those of each;
        control: where they ask the
        control process; usage: gets what they count."""
        self.control = control
        self.routes = PublishedRoutes(self)
        self._settings = settings
        self._usage = usage
        self._keys = keys
        self._memory = memory
        self._rows = LimitRows(memory)
        count = settings.workers
        # The kernel spreads connections evenly, but not exactly so.
        self._limits = replace(
            limits,
            connections=-(-limits.connections // count),
            connections_per_address=-(-limits.connections_per_address // count),
        )
        self._running: dict[int, _Worker] = {}
        self._counted: dict[tuple[str, tuple[str, ...]], float] = {}  # by workers that have ended
        self._listeners = listeners
        self._tasks: list[asyncio.Task[None]] = []
        self._tending: Supervised | None = None
        self._drained = asyncio.Event()
        self.handed_over = False  # another gateway has the control socket

    # --- what the application calls ---

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._keep(index)) for index in range(len(self._listeners))
        ]
        self._tending = Supervised(self._tend, "tending the workers")

    @property
    def count(self) -> int:
        """That there are to be."""
        return len(self._listeners)

    @property
    def answering(self) -> int:
        """Those that were heard of, and so take connections or are about to."""
        return sum(worker.reported for worker in self._running.values())

    @property
    def alive(self) -> int:
        return len(self._running)

    def publish_keys(self) -> None:
        """The keys have changed."""
        self.tell(keys_of(self._keys, self._rows))

    def samples(self) -> Iterator[Sample]:
        """The metrics of each worker, and what those that have ended had counted."""
        for worker in self._running.values():
            yield from worker.samples
        for (name, labels), count in self._counted.items():
            yield name, labels, count

    def silent_s(self, replica_id: str) -> float | None:
        """Seconds since the replica gave any client a byte, as far as reports tell; None while
        nobody waits for one."""
        now = time.monotonic()
        silences = [
            worker.loads[replica_id].silent_s + now - worker.heard
            for worker in self._running.values()
            if replica_id in worker.loads
        ]
        return min(silences, default=None)

    def in_flight(self, replica_id: str) -> int:
        """By the last reports."""
        loads = (worker.loads.get(replica_id) for worker in self._running.values())
        return sum(load.requests for load in loads if load is not None)

    def demand(self) -> dict[str, float]:
        """As `Routes.demand`, of all workers."""
        now, found = time.monotonic(), dict[str, float]()
        for worker in self._running.values():
            for name, since in worker.waiting.items():
                found[name] = max(found.get(name, 0.0), now - since)
        return found

    async def requests(self) -> RequestsInFlight:
        """`gateway.proxy.routing.in_flight.InFlight`."""
        return together(told.found for told in await self._ask(RequestsAsked()))

    async def cancel(self, id_: str) -> int:
        return sum(told.cancelled for told in await self._ask(RequestsAsked(id_)))

    async def _ask(self, question: RequestsAsked) -> list[RequestsTold]:
        """What the workers answer; one that hangs is not waited for."""
        answers = []
        for worker in self._running.values():
            answers.append(asyncio.get_running_loop().create_future())
            worker.asked.append(answers[-1])
            worker.channel.send(question)
        told, late = await asyncio.wait(answers, timeout=_ANSWERS_S) if answers else (set(), set())
        for one in late:
            one.cancel()
        return [one.result() for one in told if not one.cancelled()]

    @property
    def know_the_table(self) -> bool:
        """Whether every worker has reported since it took over the last table of routes."""
        return all(worker.tables == worker.told for worker in self._running.values())

    def tell(self, message: ToWorker) -> None:
        for worker in self._running.values():
            worker.told += isinstance(message, RouteTableMessage)
            worker.channel.send(message)

    @property
    def listeners(self) -> list[socket.socket]:
        """Of all workers, each once."""
        return list(dict.fromkeys(one for given in self._listeners for one in given))

    async def leave(self, within_s: float) -> None:
        """Another gateway has the listening sockets. Returns when all workers have ended."""
        self._drained.set()
        self.tell(Leave(within_s))
        for listener in self.listeners:
            listener.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)

    def drain(self) -> None:
        """The workers take no new connections and finish what they are answering."""
        self._drained.set()
        for listener in self.listeners:
            listener.close()
        for worker in self._running.values():
            _end(worker.process)

    async def close(self) -> None:
        """Returns when all have ended."""
        self.drain()
        if self._tending is not None:
            await self._tending.close()
        _, late = (
            await asyncio.wait(self._tasks, timeout=self._settings.stop_grace_s + 5)
            if self._tasks
            else ((), ())
        )
        for worker in self._running.values():
            log.warning("a worker does not end and is killed", worker=worker.index)
            worker.process.kill()
        if late:
            await asyncio.wait(late)

    # --- one worker ---

    async def _keep(self, index: int) -> None:
        """Has the worker run."""
        wait_s = _BACKOFF_S
        while not self._drained.is_set():
            began = time.monotonic()
            try:
                code: int | None = await self._run(index)
            except Exception:
                log.exception("a worker cannot be started", worker=index)
                code = None
            young = time.monotonic() - began < _YOUNG_S
            wait_s = min(2 * wait_s, _BACKOFF_MAX_S) if young else _BACKOFF_S
            if not self._drained.is_set():
                log.error(
                    "a worker has ended and is started again",
                    worker=index,
                    exit_code=code,
                    in_s=wait_s,
                )
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._drained.wait()

    async def _run(self, index: int) -> int:
        """Starts a worker and hears it until it has ended; its exit code."""
        ours, theirs = socket.socketpair()
        listening = [one.fileno() for one in self._listeners[index]]
        ends = (theirs.fileno(), self._memory.descriptor)
        given = (
            str(self._settings.data.resolve()),
            str(index),
            ",".join(map(str, listening)),
            *map(str, ends),
        )
        arguments = ("-m", "gateway.proxy.workers.worker", *given)
        # Without the settings: what it needs it is told, and keys in clear are not among it. In a
        # session of its own, so that Ctrl+C comes to the control process alone.
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("FITSERVE_")
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            pass_fds=(*listening, *ends),
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        worker = _Worker(index, process, await Channel.of(ours), time.monotonic())
        try:
            # No table can change between these two.
            worker.channel.send(self._begin())
            self._running[index] = worker
            if self._drained.is_set():
                _end(process)
            await self._hear(worker)
        finally:
            code = await self._ended(worker)
        return code

    def _begin(self) -> Begin:
        settings = self._settings
        return Begin(
            workers=settings.workers,
            control=str(self.control),
            limits=self._limits,
            queue_per_model=settings.queue_per_model,
            grace_s=settings.stop_grace_s,
            log_level=settings.log_level,
            access_log=settings.access_log,
            tls=(
                None
                if settings.tls_cert is None
                else (str(settings.tls_cert), str(settings.tls_key) if settings.tls_key else None)
            ),
            routes=table_of(self.routes.table),
            keys=keys_of(self._keys, self._rows),
        )

    async def _hear(self, worker: _Worker) -> None:
        """Until it is gone."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                try:
                    report = await worker.channel.from_worker()
                except msgspec.MsgspecError as error:
                    log.error(  # noqa: TRY400
                        "a worker is not of this version", worker=worker.index, error=str(error)
                    )
                    return
                if isinstance(report, RequestsTold):
                    waiting = worker.asked.popleft()
                    if not waiting.done():
                        waiting.set_result(report)
                    continue
                worker.reported = True
                worker.heard, worker.silent_looks, worker.loads = time.monotonic(), 0, report.loads
                worker.samples = worker.samples if report.samples is None else report.samples
                self._usage.add(report.usage)
                self._take(worker, report)

    def _take(self, worker: _Worker, report: Report) -> None:
        """Which tables it knows and what waits there."""
        before, worker.tables = (worker.tables, worker.waiting.keys()), report.tables
        worker.waiting = {
            name: worker.heard - waited_s for name, waited_s in report.waiting.items()
        }
        if before[0] != worker.tables or worker.waiting.keys() - before[1]:
            self.routes.demanded()

    async def _ended(self, worker: _Worker) -> int:
        """After the end of a worker: its streams have ended with it, its counts remain."""
        try:
            async with asyncio.timeout(2):
                code = await worker.process.wait()
        except TimeoutError:
            worker.process.kill()
            code = await worker.process.wait()
        worker.channel.close()
        self._running.pop(worker.index, None)
        for waiting in worker.asked:
            waiting.cancel()
        for name, labels, count in worker.samples:
            if _lasting(name):
                self._counted[name, labels] = self._counted.get((name, labels), 0) + count
        self._rows.forget(worker.index)
        return code

    async def _tend(self) -> float:
        """Tells each worker the requests in flight at the others, and ends workers that hang. The
        seconds until it is wanted again."""
        for worker in self._running.values():
            others = (other.loads for other in self._running.values() if other is not worker)
            in_flight = _summed(others)
            if worker.elsewhere != in_flight:
                worker.elsewhere = in_flight
                worker.channel.send(Elsewhere(in_flight))
            # Not by the clock: where this process gets no time, a worker gets none either, or is
            # not heard.
            worker.silent_looks += 1
            if worker.silent_looks * REPORT_S > HUNG_S:
                log.error("a worker hangs and is killed", worker=worker.index)
                worker.process.kill()
        return REPORT_S


def _summed(loads: Iterable[dict[str, ReplicaLoad]]) -> dict[str, int]:
    summed: Counter[str] = Counter()
    for one in loads:
        summed.update({id_: load.requests for id_, load in one.items()})
    return dict(summed)


def _lasting(name: str) -> bool:
    return (
        name in _LASTING
        or name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") in _LASTING
    )


def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
