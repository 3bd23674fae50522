"""GET /admin/live: the state of the page as server-sent events, computed once for all open pages.

The first event has all parts, later ones the changed parts. A slow page misses events, but gets
the newest state. `at` is this machine's time.

    gateway   version, host, problems
    machine   GPUs with their engines, and the machines of its cluster
    models    each model with its replicas, endpoints and requests
    requests  the oldest in flight, and the number of further ones
    points    of the last minutes, also without a page: rates, and seconds to the first byte
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from starlette import types
from starlette.responses import Response

from gateway.errors import HostError
from gateway.logging import Logger
from gateway.proxy.access.auth import Keys
from gateway.proxy.disconnect import wait_for_disconnect
from gateway.proxy.metrics.counters import Sample
from gateway.proxy.routing.in_flight import InFlightSource
from gateway.server.gateway_parts import gateway_of
from gateway.server.page.live_state import live_machine, live_models
from gateway.server.page.traffic_history import TrafficHistory, TrafficPoint

if TYPE_CHECKING:
    from gateway.controller.loop import Loop
    from gateway.domain import MachineView, NodeLink, PreparedView

    HostAnswers = tuple[Sequence[PreparedView], Sequence[MachineView]]

router = APIRouter(prefix="/admin", tags=["admin"])
log = Logger("fitserve.page")

T = TypeVar("T")

TICK_S = 1.0
# Seconds between two probes of the machine, and between two points of traffic.
SLOW_TICK_S = 5.0
# Seconds that each look waits for the host.
_HOST_PATIENCE_S = 0.5
# Longest silence of a stream, so that both ends detect a dead connection.
_MAX_SILENCE_S = 15.0
_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
]


async def _answer(call: Awaitable[Sequence[T]]) -> Sequence[T]:
    """The answer of the host; nothing while it gives none."""
    try:
        return await call
    except HostError:
        return ()


async def _no_machines() -> Sequence[MachineView]:
    """The machines of a host without a cluster."""
    return ()


@dataclass(eq=False)
class Reader:
    """An open page. version: the last that was sent to it."""

    version: int = 0
    sent_at: float = 0.0
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class LiveStream:
    """Computes the state while there are readers, and wakes them."""

    def __init__(
        self,
        loop: Loop,
        samples: Callable[[], list[Sample]],
        in_flight: InFlightSource,
        keys: Keys,
        machine_facts: Mapping[str, Any],
        links: Callable[[], Iterable[NodeLink]] = tuple,
        recorded_models: frozenset[str] | None = None,
    ) -> None:
        """samples: metrics of all processes.
        in_flight: requests of all processes.
        machine_facts: constant facts of the gateway.
        links: the networks between the machines of its cluster.
        recorded_models: models recorded for all keys; None: nothing is recorded.
        """
        self._models = loop.fleet.models
        self._plan_preview = loop.plan_preview
        self._expected_start = loop.starts.expected_time
        self._read_prepared = loop.read_prepared
        self._machines = loop.machines
        self._health = loop.health
        self._routes = loop.routes
        self._samples = samples
        self._in_flight = in_flight
        self._keys = keys
        self._machine_facts = machine_facts
        self._links = links
        self._recorded_models = recorded_models
        self._traffic = TrafficHistory()
        self._parts: dict[str, tuple[int, bytes]] = {}
        self._points: list[tuple[int, TrafficPoint]] = []
        self._version = 0
        self._frames: dict[int, bytes] = {}
        self._slow_at = 0.0
        self._readers: set[Reader] = set()
        self._host_answers: HostAnswers = (), ()
        """The last ones, of a host that may be silent now."""
        self._host_question: asyncio.Task[HostAnswers] | None = None
        self._task: asyncio.Task[None] | None = None
        self._counting: asyncio.Task[None] | None = None
        self._is_stopped = False

    def start(self) -> None:
        """Count traffic from now on, also without a page."""
        self._counting = asyncio.create_task(self._count())

    async def _count(self) -> None:
        """Add a point every `SLOW_TICK_S` seconds. A point costs as much as a reading of
        /metrics."""
        while True:
            try:
                point = self._traffic.add(self._samples(), time.time())
            except Exception:
                log.exception("the traffic could not be counted")
                point = None
            if point is not None:
                self._version += 1
                self._frames.clear()
                remembered = set(map(id, self._traffic.points))
                self._points = [entry for entry in self._points if id(entry[1]) in remembered]
                self._points.append((self._version, point))
            await asyncio.sleep(SLOW_TICK_S)

    def join(self) -> Reader:
        reader = Reader(sent_at=time.monotonic())
        if self._is_stopped:
            return reader
        self._readers.add(reader)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return reader

    def remove(self, reader: Reader) -> None:
        self._readers.discard(reader)
        if not self._readers and self._task is not None:
            self._task.cancel()
            self._rest()

    def has_ended(self, reader: Reader) -> bool:
        """Whether the reader has to connect again with its key."""
        return reader not in self._readers

    def news(self, reader: Reader) -> bytes:
        """The parts that the reader has not received, as an event; a comment after a long silence;
        otherwise nothing."""
        if self._parts and reader.version < self._version:
            frame = self._frames.get(reader.version)
            if frame is None:
                frame = self._frames[reader.version] = self._next_frame(reader.version)
            reader.version, reader.sent_at = self._version, time.monotonic()
            return frame
        if time.monotonic() - reader.sent_at >= _MAX_SILENCE_S:
            reader.sent_at = time.monotonic()
            return b":\n\n"
        return b""

    def _next_frame(self, version_seen: int) -> bytes:
        frame_parts = [b'"at":%.1f' % time.time()]
        frame_parts += [
            b'"%b":%b' % (name.encode(), data)
            for name, (version, data) in self._parts.items()
            if version > version_seen
        ]
        points = [point for version, point in self._points if version > version_seen]
        frame_parts += [b'"points":' + msgspec.json.encode(points)] if points else []
        return b"data: {%b}\n\n" % b",".join(frame_parts)

    async def _run(self) -> None:
        table = self._keys.table
        while True:
            try:
                await self._update()
            except Exception:
                log.exception("the state for the page could not be read")
            if self._keys.table is not table:
                # The key of a page may have been revoked.
                self._disconnect_all()
                return
            now_s = time.monotonic()
            for reader in self._readers:
                if reader.version < self._version or now_s - reader.sent_at >= _MAX_SILENCE_S:
                    reader.wake.set()
            await asyncio.sleep(TICK_S)

    def stop(self) -> None:
        """End all streams and start no other, because the gateway stops."""
        for task in (self._task, self._counting):
            if task is not None:
                task.cancel()
        self._is_stopped = True
        self._disconnect_all()

    def _disconnect_all(self) -> None:
        for reader in self._readers:
            reader.wake.set()
        self._readers.clear()
        self._rest()

    def _rest(self) -> None:
        """Drop the state without readers. The next page waits for a new one."""
        if self._host_question is not None:
            self._host_question.cancel()
        self._host_question = None
        self._host_answers = ((), ())
        self._task = None
        self._slow_at = 0.0
        self._parts.clear()
        self._frames.clear()

    async def _update(self) -> None:
        """Renew the state of the page, and send its changes to all browsers."""
        now_s = time.monotonic()
        samples = self._samples()
        is_slow = now_s - self._slow_at >= SLOW_TICK_S - TICK_S / 2
        parts: dict[str, Any] = {
            "gateway": {
                **self._machine_facts,
                "problems": self._health.problems,
                "keys": not self._keys.is_open,
                "recorded": self._recorded_owners(),
            },
            "models": live_models(
                list(self._models.values()), self._routes, samples, self._expected_start
            ),
            "requests": await self._in_flight.requests(),
        }
        if is_slow:
            self._slow_at = now_s
            hardware = await self._plan_preview.hardware()
            prepared_views, nodes = await self._known_host_answers()
            parts["machine"] = live_machine(
                hardware, self._models, prepared_views, nodes, self._links()
            )
        version = self._version + 1
        for name, value in parts.items():
            data = msgspec.json.encode(value)
            if name not in self._parts or self._parts[name][1] != data:
                self._parts[name] = version, data
        if any(changed_at == version for changed_at, _ in self._parts.values()):
            self._version = version
            self._frames.clear()

    def _recorded_owners(self) -> list[str] | None:
        """The models and keys whose requests are recorded, in words; None: the recorder is off."""
        if self._recorded_models is None:
            return None
        keys = {key.name for key in self._keys.table.keys.values() if key.is_recorded}
        models = [
            "every model" if name == "*" else f"model {name}"
            for name in sorted(self._recorded_models)
        ]
        return models + [f"key {name}" for name in sorted(keys)]

    async def _known_host_answers(self) -> HostAnswers:
        """Processes and machines as the host answers, or as it did before while it is slow: a
        silent machine of a cluster takes seconds, and pages wait for each look."""
        if self._host_question is None:
            self._host_question = asyncio.create_task(self._query_host())
        await asyncio.wait({self._host_question}, timeout=_HOST_PATIENCE_S)
        if self._host_question.done():
            host_question = self._host_question
            self._host_question = None
            self._host_answers = host_question.result()
        return self._host_answers

    async def _query_host(self) -> HostAnswers:
        machines = self._machines.machine_views() if self._machines else _no_machines()
        prepared_views, nodes = await asyncio.gather(
            _answer(self._read_prepared()), _answer(machines)
        )
        return prepared_views, nodes


class LiveAnswer(Response):
    """Plain ASGI, because two hundred pages are written each second."""

    def __init__(self, stream: LiveStream) -> None:
        super().__init__()
        self._stream = stream

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        del scope
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        reader = self._stream.join()
        disconnected = asyncio.ensure_future(wait_for_disconnect(receive))
        disconnected.add_done_callback(lambda _: reader.wake.set())
        try:
            while not disconnected.done() and not self._stream.has_ended(reader):
                if news := self._stream.news(reader):
                    await send({"type": "http.response.body", "body": news, "more_body": True})
                await reader.wake.wait()
                reader.wake.clear()
        finally:
            self._stream.remove(reader)
            disconnected.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await disconnected
        await send({"type": "http.response.body", "body": b""})


@router.get(
    "/live",
    response_class=Response,
    responses={200: {"content": {"text/event-stream": {}}, "description": "An endless stream"}},
)
async def live(request: Request) -> Response:
    """The state of the page as server-sent events: first complete, then the changed parts, as JSON
    by name. Parts: `gateway`, `machine`, `models`, `requests`, `points`, and `at`, this machine's
    time in Unix seconds."""
    return LiveAnswer(gateway_of(request).live)
