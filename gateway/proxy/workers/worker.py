"""A worker process: answers inference, and forwards other requests to the control process.

    python -m gateway.proxy.workers.worker DATA_DIR INDEX LISTENERS CHANNEL MEMORY

The last three arguments are file descriptors. SIGTERM ends the worker after its current answers.
When the control process dies, the worker continues with the last tables. The next gateway on the
same data folder ends the worker (`gateway.proxy.workers.orphaned_workers`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from gateway.decoding import DECODE_ERRORS
from gateway.garbage import exempt_start_objects
from gateway.logging import configure_logging
from gateway.proxy.access.auth import Keys
from gateway.proxy.access.budgets import BudgetAdmission
from gateway.proxy.access.failed_logins import FailedLogins
from gateway.proxy.access.ledger import Ledger
from gateway.proxy.access.origins import Origins
from gateway.proxy.client_connection import client_protocol, inner_protocol
from gateway.proxy.data_plane import DataPlane
from gateway.proxy.metrics.counters import Sample
from gateway.proxy.metrics.request_metrics import request_metrics
from gateway.proxy.ollama.ollama_app import OllamaApp
from gateway.proxy.shared_memory import SharedMemory
from gateway.proxy.tls import CertificatePair, server_context
from gateway.proxy.uvicorn_config import uvicorn_config
from gateway.proxy.workers.channel import (
    REPORT_S,
    Channel,
    KeyTableMessage,
    NewCertificate,
    OtherLoads,
    Report,
    RequestsQuery,
    RequestsReport,
    RouteTableMessage,
    Shutdown,
    WorkerSetup,
    receive_begin,
)
from gateway.proxy.workers.control_forwarder import ControlForwarder
from gateway.proxy.workers.shared_limits import SharedRateLimiter
from gateway.proxy.workers.shared_routes import SharedRoutes, table_from
from gateway.proxy.workers.sockets import inner_path, listen_at
from gateway.supervision import SupervisedTask

if TYPE_CHECKING:
    from gateway.proxy.transcripts.copying_meter import CopyingMeter

log = logging.getLogger("fitserve.worker")

# A control process that has this many unread bytes hangs. The worker reports again once it reads.
_MAX_UNREAD_BYTES = 4 * 1024 * 1024
_PAGE = os.sysconf("SC_PAGE_SIZE")
_BACKLOG = 128


class Worker:
    """Applies the messages of the control process, and reports to it."""

    def __init__(
        self, index: int, begin: WorkerSetup, memory: SharedMemory, ledger: Ledger
    ) -> None:
        self.routes = SharedRoutes(begin, memory)
        origins = Origins(frozenset(begin.limits.origins))
        self.keys = Keys(None, None, failed_logins=FailedLogins(memory=memory), origins=origins)
        self.limiter = SharedRateLimiter(memory, index, BudgetAdmission(ledger, begin.prices))
        self.metrics = request_metrics(
            has_access_log=begin.access_log, trace_ratio=begin.trace_ratio
        )
        self.plane = DataPlane(
            self.routes, self.keys, begin.limits, self.metrics, limiter=self.limiter
        )
        self.copying = _copying_meter(self.plane, begin)
        self.drain: Callable[[float], object] = lambda _: None
        self._index = index
        self._tables = 0
        self._count_at = -math.inf
        self.tls = (
            server_context(CertificatePair(begin.tls.chain, begin.tls.key)) if begin.tls else None
        )
        self._set_keys(begin.keys)

    async def listen(self, channel: Channel) -> None:
        """Apply messages until the control process is gone."""
        reporting = SupervisedTask(
            partial(self._report, channel), "reports to the control process", worker=self._index
        )
        self.routes.on_demand = partial(self._send_report, channel)
        try:
            while True:
                match await channel.read_command():
                    case RouteTableMessage() as table:
                        self.routes.table = table_from(table)
                        self._tables += 1
                        self._send_report(channel)
                    case KeyTableMessage() as keys:
                        self._set_keys(keys)
                    case NewCertificate(chain, key):
                        self._set_certificate(CertificatePair(chain, key))
                    case OtherLoads(in_flight, kept_places):
                        self.routes.set_other_loads(in_flight, kept_places)
                    case Shutdown(within_s):
                        self.drain(within_s)
                    case RequestsQuery(cancel):
                        ended_count = await self.plane.cancel(cancel) if cancel else 0
                        channel.send(RequestsReport(await self.plane.requests(), ended_count))
        except (EOFError, OSError):
            log.warning(
                "the control process is gone; worker %d continues with the last routes and keys",
                self._index,
            )
        finally:
            self.routes.set_other_loads(None)
            await reporting.close()

    def _set_certificate(self, pair: CertificatePair) -> None:
        if self.tls is not None:
            try:
                pair.load_into(self.tls)
            except OSError as error:  # no free descriptor
                log.warning("the worker keeps its former certificate: %s", error.strerror)

    def _set_keys(self, table: KeyTableMessage) -> None:
        self.keys.swap(table.keys, is_closed=table.is_closed)
        self.limiter.rows = table.rows
        self.limiter.retain(self.keys.table.keys)

    async def _report(self, channel: Channel) -> float:
        """Send one report. The seconds until the next."""
        start_s = time.monotonic()
        if channel.unread_bytes < _MAX_UNREAD_BYTES:
            samples = None
            if start_s >= self._count_at:
                samples = tuple(self._worker_samples())
                # Many series are counted less often, so that counting takes at most a hundredth of
                # the time.
                self._count_at = time.monotonic() + 100 * (time.monotonic() - start_s) - REPORT_S
            self._send_report(channel, samples)
        return REPORT_S

    def _send_report(self, channel: Channel, samples: tuple[Sample, ...] | None = None) -> None:
        usage = self.metrics.usage.drain()
        channel.send(
            Report(
                self.routes.loads(),
                samples,
                self._tables,
                self.routes.demand(),
                usage=usage,
                kept_places=self.routes.kept_places(),
                spans=self.metrics.drain_spans(),
            )
        )

    async def send_last_report(self, channel: Channel) -> None:
        """Send the last counts."""
        self._send_report(channel, tuple(self._worker_samples()))
        for _ in range(100):
            if channel.unread_bytes:
                await asyncio.sleep(0.01)

    def _worker_samples(self) -> Iterator[Sample]:
        yield from self.metrics.samples()
        if self.copying is not None:
            yield from self.copying.samples()
        for name in self.routes.table.models:
            if waiting_count := self.routes.waiting(name):
                yield "fitserve_requests_queued", (name,), waiting_count
        yield "fitserve_connections", (), len(self.plane.connections)
        yield "process_cpu_seconds_total", (), round(time.process_time(), 6)
        yield (
            "process_resident_memory_bytes",
            (),
            int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE,
        )
        yield ("process_open_fds", (), len(os.listdir("/proc/self/fd")))  # noqa: PTH208


def _copying_meter(plane: DataPlane, begin: WorkerSetup) -> CopyingMeter | None:
    """The meter that copies requests; None: none is copied, and no module for it is imported."""
    if begin.transcripts is None:
        return None
    from gateway.proxy.transcripts.copying import copy_requests
    from gateway.proxy.transcripts.transcript_setup import TranscriptSetup

    return copy_requests(plane, TranscriptSetup(*begin.transcripts))


class WorkerServer(uvicorn.Server):
    """A uvicorn server that also listens to the control process."""

    def __init__(
        self, config: uvicorn.Config, worker: Worker, end: socket.socket, socket_path: Path
    ) -> None:
        """socket_path: the path for requests of the control process."""
        super().__init__(config)
        self._worker = worker
        self._end = end
        self._inner_path = socket_path
        self._inner_server: asyncio.AbstractServer | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._channel = await Channel.open(self._end)
        self._worker.drain = self._drain
        self._listening = asyncio.create_task(self._worker.listen(self._channel))
        self._listening.add_done_callback(self._check_listener)
        await self._listen_inside()
        await super().startup(sockets)
        exempt_start_objects()

    async def _listen_inside(self) -> None:
        """Take requests of the control process, for batches. Without such a socket, as on a full
        disk, they go to other workers."""
        protocol = inner_protocol(self._worker.plane, self.config, self.server_state)
        try:
            listener = listen_at(self._inner_path, _BACKLOG)
        except OSError as error:
            log.warning("the worker takes no requests of batches: %s", error.strerror)
            return
        loop = asyncio.get_running_loop()
        self._inner_server = await loop.create_unix_server(protocol, sock=listener)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop like uvicorn, then end unfinished answers with an error."""
        if self._inner_server is not None:
            self._inner_server.close()
        await super().shutdown(sockets)
        connections = self._worker.plane.connections
        self._worker.plane.close()
        for _ in range(100):
            if connections:
                await asyncio.sleep(0.01)
        if self._worker.copying is not None:
            await self._worker.copying.link.close()
        await self._worker.send_last_report(self._channel)

    def _drain(self, within_s: float) -> None:
        self._draining = asyncio.create_task(self._worker.plane.drain(self, within_s))

    def _check_listener(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("worker and control process have different versions: %r", error)
            os._exit(1)


def main() -> None:
    index = int(sys.argv[2])
    listeners = [socket.socket(fileno=int(number)) for number in sys.argv[3].split(",")]
    end = socket.socket(fileno=int(sys.argv[4]))
    memory = SharedMemory(int(sys.argv[5]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        begin = receive_begin(end)
    except EOFError:
        return  # the control process died first
    except DECODE_ERRORS as error:
        sys.exit(f"fitserve: worker and control process have different versions: {error}")
    configure_logging(begin.log_level)
    worker = Worker(index, begin, memory, Ledger(Path(sys.argv[1])))
    app = OllamaApp(ControlForwarder(Path(begin.control)), worker.plane)
    protocol = client_protocol(worker.plane, worker.tls)
    config = uvicorn_config(app, protocol, lifespan="off", grace_s=begin.grace_s)
    socket_path = inner_path(Path(begin.control), index)
    WorkerServer(config, worker, end, socket_path).run(sockets=listeners)


if __name__ == "__main__":
    main()
