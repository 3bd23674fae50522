"""GET /admin/live: the state that the page shows, as server-sent events. It is looked at once for
all pages, and not at all without one.

The first event has everything, each later one the parts that are otherwise than in the one before;
a page that reads slowly misses events, not what became of the state. `at` is the time of this
machine.

    gateway  what runs, and its problems      models  each model with its replicas, endpoints and requests
    machine  GPUs, and who holds them         points  of the last minutes: rates, and seconds to the first byte
    requests the oldest of those in flight, and how many more there are
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette import types
from starlette.responses import Response

from gateway.controller.fleet.fleet import Fleet
from gateway.controller.loop_health import LoopHealth
from gateway.controller.plan_preview import PlanPreview
from gateway.logging import Logger
from gateway.proxy.access.auth import Keys
from gateway.proxy.metrics.counters import Sample
from gateway.proxy.routing.in_flight import InFlight
from gateway.proxy.routing.routes import Routes
from gateway.server.page.live_state import live_machine, live_models
from gateway.server.page.traffic import Point, Traffic

router = APIRouter(prefix="/admin", tags=["admin"])
log = Logger("fitserve.page")

TICK_S = 1.0
# The machine is probed, and a point is made, so often.
SLOW_S = 5.0
# An event comes at least so often, so that both ends see a connection that is dead.
_SILENT_S = 15.0
_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
]


@dataclass(eq=False)
class Reader:
    """A page that is open. seen: the version that it was sent last."""

    seen: int = 0
    sent_at: float = 0.0
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class LiveStream:
    """Looks while there are readers, and wakes them."""

    def __init__(
        self,
        fleet: Fleet,
        plan_preview: PlanPreview,
        health: LoopHealth,
        routes: Routes,
        samples: Callable[[], list[Sample]],
        in_flight: InFlight,
        keys: Keys,
        about: Mapping[str, Any],
    ) -> None:
        """samples: what is counted, of all processes; in_flight: as well. about: what stays as it
        is as long as the gateway runs."""
        self._models = fleet.models
        self._plan_preview = plan_preview
        self._health = health
        self._routes = routes
        self._samples = samples
        self._in_flight = in_flight
        self._keys = keys
        self._about = about
        self._traffic = Traffic()
        self._parts: dict[str, tuple[int, bytes]] = {}
        self._points: list[tuple[int, Point]] = []
        self._version = 0
        self._frames: dict[int, bytes] = {}
        self._slow_at = 0.0
        self._readers: set[Reader] = set()
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    def join(self) -> Reader:
        reader = Reader(sent_at=time.monotonic())
        if self._stopped:
            return reader
        self._readers.add(reader)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return reader

    def leave(self, reader: Reader) -> None:
        self._readers.discard(reader)
        if not self._readers and self._task is not None:
            self._task.cancel()
            self._rest()

    def ended(self, reader: Reader) -> bool:
        """The reader has to come again, with its key."""
        return reader not in self._readers

    def news(self, reader: Reader) -> bytes:
        """What the reader has not seen yet, as an event, or a comment where it is only long ago;
        empty: nothing."""
        if self._parts and reader.seen < self._version:
            frame = self._frames.get(reader.seen)
            if frame is None:
                frame = self._frames[reader.seen] = self._frame(reader.seen)
            reader.seen, reader.sent_at = self._version, time.monotonic()
            return frame
        if time.monotonic() - reader.sent_at >= _SILENT_S:
            reader.sent_at = time.monotonic()
            return b":\n\n"
        return b""

    def _frame(self, seen: int) -> bytes:
        parts = [b'"at":%.1f' % time.time()]
        parts += [
            b'"%b":%b' % (name.encode(), data)
            for name, (version, data) in self._parts.items()
            if version > seen
        ]
        points = [point for version, point in self._points if version > seen]
        parts += [b'"points":' + msgspec.json.encode(points)] if points else []
        return b"data: {%b}\n\n" % b",".join(parts)

    async def _run(self) -> None:
        table = self._keys.table
        while True:
            try:
                await self._look()
            except Exception:
                log.exception("the state for the page could not be read")
            if self._keys.table is not table:
                # One of the pages may have a key that was revoked.
                self._send_away()
                return
            now = time.monotonic()
            for reader in self._readers:
                if reader.seen < self._version or now - reader.sent_at >= _SILENT_S:
                    reader.wake.set()
            await asyncio.sleep(TICK_S)

    def stop(self) -> None:
        """The gateway stops: all streams end, and no other begins."""
        if self._task is not None:
            self._task.cancel()
        self._stopped = True
        self._send_away()

    def _send_away(self) -> None:
        for reader in self._readers:
            reader.wake.set()
        self._readers.clear()
        self._rest()

    def _rest(self) -> None:
        """Nobody reads. The next page waits for a fresh look."""
        self._task, self._slow_at = None, 0.0
        self._parts.clear()
        self._frames.clear()
        self._traffic.pause()

    async def _look(self) -> None:
        now = time.monotonic()
        samples, slow = self._samples(), now - self._slow_at >= SLOW_S - TICK_S / 2
        found: dict[str, Any] = {
            "gateway": {
                **self._about,
                "problems": self._health.problems,
                "keys": not self._keys.open,
            },
            "models": live_models(list(self._models.values()), self._routes, samples),
            "requests": await self._in_flight.requests(),
        }
        point = None
        if slow:
            self._slow_at = now
            point = self._traffic.look(samples, time.time())
            found["machine"] = live_machine(await self._plan_preview.hardware(), self._models)
        version = self._version + 1
        for name, value in found.items():
            data = msgspec.json.encode(value)
            if name not in self._parts or self._parts[name][1] != data:
                self._parts[name] = version, data
        if point is not None:
            kept = set(map(id, self._traffic.points))
            self._points = [one for one in self._points if id(one[1]) in kept] + [(version, point)]
        if point is not None or any(made == version for made, _ in self._parts.values()):
            self._version = version
            self._frames.clear()


class LiveAnswer(Response):
    """Plain ASGI: two hundred pages are written to each second."""

    def __init__(self, stream: LiveStream) -> None:
        super().__init__()
        self._stream = stream

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        del scope
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        reader = self._stream.join()
        left = asyncio.ensure_future(_left(receive))
        left.add_done_callback(lambda _: reader.wake.set())
        try:
            while not left.done() and not self._stream.ended(reader):
                if news := self._stream.news(reader):
                    await send({"type": "http.response.body", "body": news, "more_body": True})
                await reader.wake.wait()
                reader.wake.clear()
        finally:
            self._stream.leave(reader)
            left.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await left
        await send({"type": "http.response.body", "body": b""})


async def _left(receive: types.Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@router.get(
    "/live",
    response_class=Response,
    responses={
        200: {"content": {"text/event-stream": {}}, "description": "A stream that does not end"}
    },
)
async def live(request: Request) -> Response:
    """The state as the page shows it, as server-sent events: all of it first, then the parts that
    changed, as JSON by their names: `gateway`, `machine`,
    `models`, `requests`, `points`; and `at`, this machine's time in Unix seconds."""
    return LiveAnswer(request.app.state.live)
