"""The workers of a gateway, as the control process starts, watches and ends them.

The control process owns the state: the loop, the store, the admin API. Workers own the connections.
Each worker has its own listening socket on the one port (SO_REUSEPORT), so the kernel spreads
connections evenly by their addresses. With one shared socket, the first worker to wake would take
them all. The control process holds the sockets too: connections to a dead worker wait for its
successor.

    a worker dies             its streams end; it is restarted immediately, or after a doubling
                              delay if it died young
    a worker hangs            it reports nothing for HANG_TIMEOUT_S and is killed
    the control process dies  the workers continue; the next gateway on the data folder ends them
                              (`gateway.proxy.workers.orphaned_workers`)
    SIGTERM                   all workers finish their answers, within the grace time
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gateway.decoding import DECODE_ERRORS
from gateway.logging import Logger
from gateway.proxy.access.auth import Keys
from gateway.proxy.access.prices import Prices
from gateway.proxy.limits import Limits
from gateway.proxy.metrics.counters import METRICS, Sample
from gateway.proxy.metrics.usage_counter import UsageCounter
from gateway.proxy.routing.in_flight import RequestsInFlight, merge
from gateway.proxy.tls import CertificatePair
from gateway.proxy.transcripts.transcript_setup import TranscriptSetup
from gateway.proxy.workers.channel import (
    REPORT_S,
    Channel,
    NewCertificate,
    OtherLoads,
    ReplicaLoad,
    Report,
    RequestsQuery,
    RequestsReport,
    RouteTableMessage,
    Shutdown,
    ToWorker,
    WorkerSetup,
    build_key_message,
    build_route_message,
)
from gateway.proxy.workers.published_routes import PublishedRoutes
from gateway.proxy.workers.shared_limits import LimitRows
from gateway.proxy.workers.shared_parts import SharedParts
from gateway.proxy.workers.sockets import inner_path, short_path
from gateway.settings import Settings
from gateway.supervision import SupervisedTask

log = Logger("fitserve.workers")

HANG_TIMEOUT_S = 30.0
# Seconds for an answer of a worker. A slower worker hangs or gets no CPU time.
_ANSWERS_S = 1.0
# A worker with a shorter life failed at its start.
_SHORT_LIFE_S = 3.0
_BACKOFF_S = 0.05
_BACKOFF_MAX_S = 10.0
# Metrics of a worker that remain after its end.
_LASTING_METRICS = frozenset(metric.name for metric in METRICS if metric.kind != "gauge")


@dataclass(eq=False)
class _Worker:
    """A running worker."""

    index: int
    process: asyncio.subprocess.Process
    channel: Channel
    reported_at: float
    missed_reports: int = 0  # since its last report
    has_reported: bool = False
    loads: dict[str, ReplicaLoad] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    kept_places: dict[str, int] = field(default_factory=dict)
    sent_loads: OtherLoads | None = None  # last sent
    tables_sent: int = 0  # route tables sent
    tables_applied: int = 0  # route tables that it has applied
    # The start of the wait by the clock of this process, by model.
    waiting_since: dict[str, float] = field(default_factory=dict)
    # The queries are unanswered.
    queries: deque[asyncio.Future[RequestsReport]] = field(default_factory=deque)


class Workers:
    """All workers. `routes` are for the control loop."""

    def __init__(
        self,
        settings: Settings,
        limits: Limits,
        keys: Keys,
        *,
        shared_parts: SharedParts,
        usage: UsageCounter,
        prices: Prices,
        on_spans: Callable[[tuple[tuple[Any, ...], ...]], object] | None = None,
        transcripts: TranscriptSetup | None = None,
    ) -> None:
        """limits: the limits of the whole gateway.
        usage: gets their counts.
        on_spans: called with the spans of each report; None: traces are off.
        transcripts: the requests that are copied; None: none is.
        """
        memory = shared_parts.memory
        self.control = shared_parts.control
        self.routes = PublishedRoutes(self)
        self._settings = settings
        self._usage = usage
        self._tls: NewCertificate | None = None
        self._keys = keys
        self._memory = memory
        self._rows = LimitRows(memory)
        count = settings.workers
        # The kernel spreads connections evenly, but not exactly.
        self._limits = replace(
            limits,
            connections=-(-limits.connections // count),
            connections_per_address=-(-limits.connections_per_address // count),
        )
        self._running_workers: dict[int, _Worker] = {}
        # Counts of workers that have ended.
        self._counted_requests: dict[tuple[str, tuple[str, ...]], float] = {}
        self._listeners = shared_parts.listeners
        self._tasks: list[asyncio.Task[None]] = []
        self._watching: SupervisedTask | None = None
        self._drain_event = asyncio.Event()
        self._prices = prices
        self._on_spans = on_spans
        self._transcripts = transcripts
        self.was_handed_over = False  # another gateway has the control socket

    # --- called by the application ---

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._supervise_worker(index))
            for index in range(len(self._listeners))
        ]
        self._watching = SupervisedTask(self._watch, "watching the workers")

    @property
    def count(self) -> int:
        """The number of workers to run."""
        return len(self._listeners)

    @property
    def answering(self) -> int:
        """The number of workers that have reported, and so take connections or will shortly."""
        return sum(worker.has_reported for worker in self._running_workers.values())

    @property
    def alive(self) -> int:
        return len(self._running_workers)

    def publish_keys(self) -> None:
        """Send the changed keys to all workers."""
        self.broadcast(build_key_message(self._keys, self._rows))

    def publish_certificate(self, pair: CertificatePair) -> None:
        """Give all workers the certificate in use."""
        self._tls = NewCertificate(pair.chain, pair.key)
        self.broadcast(self._tls)

    def samples(self) -> Iterator[Sample]:
        """The metrics of each worker, and the counts of ended workers."""
        for worker in self._running_workers.values():
            yield from worker.samples
        for (name, labels), count in self._counted_requests.items():
            yield name, labels, count

    def silent_s(self, replica_id: str) -> float | None:
        """Seconds since the replica gave any client a byte, by the last reports; None while no
        client waits."""
        now = time.monotonic()
        silences = [
            worker.loads[replica_id].silent_s + now - worker.reported_at
            for worker in self._running_workers.values()
            if replica_id in worker.loads
        ]
        return min(silences, default=None)

    def in_flight(self, replica_id: str) -> int:
        """Requests in flight at a replica, by the last reports."""
        loads = (worker.loads.get(replica_id) for worker in self._running_workers.values())
        return sum(load.requests for load in loads if load is not None)

    def demand(self) -> dict[str, float]:
        """Models with waiting requests in any worker, and the seconds of the oldest."""
        now = time.monotonic()
        waits = dict[str, float]()
        for worker in self._running_workers.values():
            for name, start in worker.waiting_since.items():
                waits[name] = max(waits.get(name, 0.0), now - start)
        return waits

    async def requests(self) -> RequestsInFlight:
        """The requests in flight of all workers."""
        return merge(report.requests for report in await self._query(RequestsQuery()))

    async def cancel(self, id_: str) -> int:
        # A worker that answers late ends its requests too, so it is waited for.
        reports = await self._query(RequestsQuery(id_), HANG_TIMEOUT_S)
        return sum(report.cancelled for report in reports)

    async def _query(
        self, question: RequestsQuery, timeout_s: float = _ANSWERS_S
    ) -> list[RequestsReport]:
        """The answers of the workers; a worker that hangs is skipped."""
        answers = []
        for worker in self._running_workers.values():
            answers.append(asyncio.get_running_loop().create_future())
            worker.queries.append(answers[-1])
            worker.channel.send(question)
        answered_futures, late_futures = (
            await asyncio.wait(answers, timeout=timeout_s) if answers else (set(), set())
        )
        for answer in late_futures:
            answer.cancel()
        return [answer.result() for answer in answered_futures if not answer.cancelled()]

    @cached_property
    def inner_paths(self) -> tuple[str, ...]:
        """The names of the sockets at which the workers take requests of this process."""
        folder = Path(short_path(self.control)).parent
        return tuple(str(inner_path(folder / "-", index)) for index in range(self.count))

    @property
    def have_current_table(self) -> bool:
        """Whether every worker has applied the last route table."""
        return all(
            worker.tables_applied == worker.tables_sent for worker in self._running_workers.values()
        )

    def broadcast(self, message: ToWorker) -> None:
        for worker in self._running_workers.values():
            worker.tables_sent += isinstance(message, RouteTableMessage)
            worker.channel.send(message)

    @property
    def listeners(self) -> list[socket.socket]:
        """The listening sockets of all workers, each once."""
        return list(dict.fromkeys(listener for share in self._listeners for listener in share))

    async def hand_over(self, within_s: float) -> None:
        """End the workers after a handover of the listening sockets. Returns when all have
        ended."""
        self._drain_event.set()
        self.broadcast(Shutdown(within_s))
        for listener in self.listeners:
            listener.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)

    def drain(self) -> None:
        """Have the workers take no new connections and finish their answers."""
        self._drain_event.set()
        for listener in self.listeners:
            listener.close()
        for worker in self._running_workers.values():
            _stop_process(worker.process)

    async def close(self) -> None:
        """End all workers. Returns when they have ended."""
        self.drain()
        if self._watching is not None:
            await self._watching.close()
        _, late_tasks = (
            await asyncio.wait(self._tasks, timeout=self._settings.stop_grace_s + 5)
            if self._tasks
            else ((), ())
        )
        for worker in self._running_workers.values():
            log.warning("a worker did not end in time and is killed", worker=worker.index)
            worker.process.kill()
        if late_tasks:
            await asyncio.wait(late_tasks)

    # --- one worker ---

    async def _supervise_worker(self, index: int) -> None:
        """Run and restart one worker."""
        wait_s = _BACKOFF_S
        while not self._drain_event.is_set():
            start_s = time.monotonic()
            try:
                code: int | None = await self._run_worker(index)
            except Exception:
                log.exception("a worker cannot be started", worker=index)
                code = None
            is_young = time.monotonic() - start_s < _SHORT_LIFE_S
            wait_s = min(2 * wait_s, _BACKOFF_MAX_S) if is_young else _BACKOFF_S
            if not self._drain_event.is_set():
                log.error(
                    "a worker has ended and is restarted", worker=index, exit_code=code, in_s=wait_s
                )
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._drain_event.wait()

    async def _run_worker(self, index: int) -> int:
        """Start a worker and read its messages until it has ended. Returns the worker's exit
        code."""
        local_end, remote_end = socket.socketpair()
        listening = [listener.fileno() for listener in self._listeners[index]]
        ends = (remote_end.fileno(), self._memory.descriptor)
        parameters = (
            str(self._settings.data.resolve()),
            str(index),
            ",".join(map(str, listening)),
            *map(str, ends),
        )
        arguments = ("-m", "gateway.proxy.workers.worker", *parameters)
        # Settings reach a worker by messages, without keys in clear text. Its own session keeps
        # Ctrl+C to the control process.
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
        remote_end.close()
        worker = _Worker(index, process, await Channel.open(local_end), time.monotonic())
        try:
            # No table can change between these two statements.
            worker.channel.send(self._setup_message())
            self._running_workers[index] = worker
            if self._drain_event.is_set():
                _stop_process(process)
            await self._read_reports(worker)
        finally:
            code = await self._clean_up(worker)
        return code

    def _setup_message(self) -> WorkerSetup:
        settings = self._settings
        return WorkerSetup(
            workers=settings.workers,
            control=str(self.control),
            limits=self._limits,
            queue_per_model=settings.queue_per_model,
            grace_s=settings.stop_grace_s,
            log_level=settings.log_level,
            access_log=settings.access_log,
            tls=self._tls,
            routes=build_route_message(self.routes.table),
            keys=build_key_message(self._keys, self._rows),
            prices=self._prices,
            trace_ratio=None if self._on_spans is None else settings.request_trace_ratio,
            transcripts=astuple(self._transcripts) if self._transcripts is not None else None,
        )

    async def _read_reports(self, worker: _Worker) -> None:
        """Read the messages of a worker until it is gone."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                try:
                    report = await worker.channel.read_report()
                except DECODE_ERRORS as error:
                    log.error(  # noqa: TRY400
                        "a worker has another version", worker=worker.index, error=str(error)
                    )
                    return
                if isinstance(report, RequestsReport):
                    query = worker.queries.popleft()
                    if not query.done():
                        query.set_result(report)
                    continue
                worker.has_reported = True
                worker.reported_at = time.monotonic()
                worker.missed_reports = 0
                worker.loads = report.loads
                worker.kept_places = report.kept_places
                worker.samples = worker.samples if report.samples is None else report.samples
                self._usage.add(report.usage)
                if self._on_spans is not None:
                    self._on_spans(report.spans)
                self._merge_report(worker, report)

    def _merge_report(self, worker: _Worker, report: Report) -> None:
        """Take over the tables and queues of a report."""
        former_tables = (worker.tables_applied, worker.waiting_since.keys())
        worker.tables_applied = report.tables
        worker.waiting_since = {
            name: worker.reported_at - waited_s for name, waited_s in report.waiting.items()
        }
        if (
            former_tables[0] != worker.tables_applied
            or worker.waiting_since.keys() - former_tables[1]
        ):
            self.routes.on_demand()

    async def _clean_up(self, worker: _Worker) -> int:
        """Clean up after a worker, whose streams have ended; keep its counts. Returns the
        worker's exit code."""
        try:
            async with asyncio.timeout(2):
                code = await worker.process.wait()
        except TimeoutError:
            worker.process.kill()
            code = await worker.process.wait()
        worker.channel.close()
        self._running_workers.pop(worker.index, None)
        for query in worker.queries:
            query.cancel()
        for name, labels, count in worker.samples:
            if _is_lasting(name):
                self._counted_requests[name, labels] = (
                    self._counted_requests.get((name, labels), 0) + count
                )
        self._rows.forget(worker.index)
        return code

    async def _watch(self) -> float:
        """Send each worker the loads of the others, and kill workers that hang. The seconds until
        the next call."""
        for worker in self._running_workers.values():
            peers = [peer for peer in self._running_workers.values() if peer is not worker]
            loads = OtherLoads(
                _sum_loads(peer.loads for peer in peers),
                _sum_places(peer.kept_places for peer in peers),
            )
            if worker.sent_loads != loads:
                worker.sent_loads = loads
                worker.channel.send(loads)
            # Counts checks, not seconds: where this process gets no CPU time, workers get none
            # either, or are not read.
            worker.missed_reports += 1
            if worker.missed_reports * REPORT_S > HANG_TIMEOUT_S:
                log.error("a worker hangs and is killed", worker=worker.index)
                worker.process.kill()
        return REPORT_S


def _sum_loads(loads: Iterable[dict[str, ReplicaLoad]]) -> dict[str, int]:
    return _sum_places(
        {id_: load.requests for id_, load in worker_loads.items()} for worker_loads in loads
    )


def _sum_places(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    summed: Counter[str] = Counter()
    for worker_counts in counts:
        summed.update(worker_counts)
    return dict(summed)


def _is_lasting(name: str) -> bool:
    return (
        name in _LASTING_METRICS
        or name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        in _LASTING_METRICS
    )


def _stop_process(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
