"""What the control process and a worker tell each other: over a socket pair, each message with its
length before it, in MessagePack.

message              from      when
Begin                control   first: how to serve, and the tables in force; the worker takes no connection before
RouteTableMessage    control   the routes have changed
KeyTableMessage      control   the keys have changed
Elsewhere            control   twice a second, where it has changed: what the other workers have in flight
Leave                control   another gateway takes over: the worker finishes what it has, and ends
RequestsAsked        control   somebody wants to see the requests in flight, or to end one
RequestsTold         worker    the answer to each of these, in their order
Report               worker    twice a second, and at once for a new table of routes and for the first request that waits for a model

Each but the last two is a whole value that replaces the one before, but for `usage` of a report.
What is not one of these is an error (msgspec checks the types): then the two are not of the same
version, and the worker is started again.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

import msgspec

from gateway.keys import UsageRow
from gateway.proxy.access.auth import Key, Keys
from gateway.proxy.limits import Limits
from gateway.proxy.metrics.counters import Sample
from gateway.proxy.routing.in_flight import RequestsInFlight
from gateway.proxy.routing.table import ModelRoute, RouteTable
from gateway.proxy.workers.shared_limits import LimitRows

REPORT_S = 0.5
_LENGTH_BYTES = 4


class RouteTableMessage(msgspec.Struct, frozen=True, tag=True):
    """`gateway.proxy.routing.routes.RouteTable`."""

    models: tuple[ModelRoute, ...]


class KeyTableMessage(msgspec.Struct, frozen=True, tag=True):
    """`gateway.proxy.access.auth.KeyTable`: digests, never a key. `rows`: of those with limits
    (`gateway.proxy.workers.shared_limits`)."""

    keys: tuple[Key, ...]
    closed: bool
    rows: dict[bytes, int]


class Begin(msgspec.Struct, frozen=True, tag=True):
    """How to serve. `control`: the path of the control process's socket; `limits` are this worker's
        own; `workers`: how many there are; `grace_s`: for the end;
    `tls`: the files of certificate and key."""

    workers: int
    control: str
    limits: Limits
    queue_per_model: int | None
    grace_s: float
    log_level: str
    access_log: bool
    tls: tuple[str, str | None] | None
    routes: RouteTableMessage
    keys: KeyTableMessage


class Elsewhere(msgspec.Struct, frozen=True, tag=True):
    """Requests in flight at the other workers, by replica id."""

    in_flight: dict[str, int]


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Take no more connections, and end when those that are here have ended, or after so long."""

    within_s: float


class RequestsAsked(msgspec.Struct, frozen=True, tag=True):
    """Which requests are in flight? `cancel`: those with this id end first; empty: none."""

    cancel: str = ""


class RequestsTold(msgspec.Struct, frozen=True, tag=True):
    """`cancelled`: how many were ended."""

    found: RequestsInFlight
    cancelled: int


class ReplicaLoad(msgspec.Struct, frozen=True, array_like=True):
    """What a worker has in flight at one replica. `silent_s`: since the replica gave it a byte."""

    requests: int
    silent_s: float


class Report(msgspec.Struct, frozen=True, tag=True):
    """`loads` by replica id; `samples`: all metrics of the worker; None: as before. `tables`: how
    many tables of routes it has taken over.
    `waiting`: for which models requests wait, and how many seconds the oldest has waited. `usage`:
    what was counted since the last report, the one thing that is not whole."""

    loads: dict[str, ReplicaLoad]
    samples: tuple[Sample, ...] | None
    tables: int = 0
    waiting: dict[str, float] = {}
    usage: tuple[UsageRow, ...] = ()


ToWorker = Begin | RouteTableMessage | KeyTableMessage | Elsewhere | Leave | RequestsAsked
FromWorker = Report | RequestsTold

_ENCODER = msgspec.msgpack.Encoder()
_TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


class Channel:
    """One end, in an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def of(cls, end: socket.socket) -> Channel:
        return cls(*await asyncio.open_unix_connection(sock=end))

    def send(self, message: ToWorker | FromWorker) -> None:
        """Without waiting; what the other end does not read is kept until it does, or is gone."""
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    @property
    def unread_bytes(self) -> int:
        """Of what was sent."""
        return self._writer.transport.get_write_buffer_size()

    async def to_worker(self) -> ToWorker:
        """The next message. Raises EOFError at the end, OSError, msgspec.ValidationError."""
        return _TO_WORKER.decode(await self._receive())

    async def from_worker(self) -> FromWorker:
        """As `to_worker`."""
        return _FROM_WORKER.decode(await self._receive())

    def close(self) -> None:
        self._writer.transport.abort()

    async def _receive(self) -> bytes:
        # IncompleteReadError is an EOFError.
        length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
        return await self._reader.readexactly(length)


def frame(message: ToWorker | FromWorker) -> bytes:
    data = _ENCODER.encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


def receive_begin(end: socket.socket) -> Begin:
    """The first message, before there is an event loop. Raises EOFError,
    msgspec.ValidationError."""
    length = int.from_bytes(_exactly(end, _LENGTH_BYTES), "big")
    return msgspec.msgpack.decode(_exactly(end, length), type=Begin)


def _exactly(end: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = end.recv(length - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def table_of(table: RouteTable) -> RouteTableMessage:
    """What is told of an engine may be no text, and cannot be sent then; nor could a client ask for
    a model of that name."""
    return RouteTableMessage(
        tuple(
            replace(
                route,
                detail=_text(route.detail),
                replicas=tuple(
                    one for one in route.replicas if one.served_name == _text(one.served_name)
                ),
            )
            for route in table.models.values()
        )
    )


def _text(said: str) -> str:
    return said.encode(errors="replace").decode()


def keys_of(keys: Keys, rows: LimitRows) -> KeyTableMessage:
    known = tuple(keys.table.keys.values())
    return KeyTableMessage(known, keys.table.closed, rows.of(known))
