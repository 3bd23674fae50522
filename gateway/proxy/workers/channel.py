"""Messages between the control process and a worker: MessagePack over a socket pair, length first.

message              from      when
WorkerSetup          control   first: configuration and tables; the worker accepts no client before
RouteTableMessage    control   the routes have changed
KeyTableMessage      control   the keys have changed
OtherLoads           control   twice a second, after a change: requests in flight at other workers,
                               and the places that they keep
Shutdown             control   another gateway takes over: the worker finishes requests, and ends
RequestsQuery        control   an operator lists the requests in flight, or ends one
RequestsReport       worker    the answers to RequestsQuery, in order
Report               worker    twice a second; immediately for a new route table, and for the first
                               request that waits for a model

Each table is a complete value that replaces the previous one; only `usage` and `spans` of a report
are differences. Any other message is an error (msgspec checks the types): the versions differ, and
the worker is restarted.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from typing import Any

import msgspec

from gateway.keys import UsageRow
from gateway.proxy.access.auth import Key, Keys
from gateway.proxy.access.prices import Prices
from gateway.proxy.limits import Limits
from gateway.proxy.metrics.counters import Sample
from gateway.proxy.routing.in_flight import RequestsInFlight
from gateway.proxy.routing.model_route import ModelRoute
from gateway.proxy.routing.route_table import RouteTable
from gateway.proxy.workers.shared_limits import LimitRows
from gateway.secret import Secret, secret_text

REPORT_S = 0.5
_LENGTH_BYTES = 4


class RouteTableMessage(msgspec.Struct, frozen=True, tag=True):
    """The table of routes for a worker.

    `gateway.proxy.routing.routes.RouteTable`.
    """

    models: tuple[ModelRoute, ...]


class KeyTableMessage(msgspec.Struct, frozen=True, tag=True):
    """The table of keys for a worker.

    `gateway.proxy.access.auth.KeyTable`: digests, never a key. `rows`: of keys with limits
    (`gateway.proxy.workers.shared_limits`).
    """

    keys: tuple[Key, ...]
    is_closed: bool
    rows: dict[bytes, int]


class NewCertificate(msgspec.Struct, frozen=True, tag=True):
    """The certificate that workers use from now on.

    `gateway.proxy.tls.CertificatePair`: the contents of a pair that fits.
    """

    chain: bytes
    key: Secret


class WorkerSetup(msgspec.Struct, frozen=True, tag=True):
    """Configuration of a worker.

    control: path of the control process's socket.
    limits: the limits of this worker.
    workers: number of all.
    grace_s: time to finish at the end.
    tls: the certificate in use.
    prices: the prices for budgets of money.
    trace_ratio: the part of requests that is traced; None: traces are off.
    transcripts: the fields of a `TranscriptSetup`; None: no request is copied.
    """

    workers: int
    control: str
    limits: Limits
    queue_per_model: int | None
    grace_s: float
    log_level: str
    access_log: bool
    tls: NewCertificate | None
    routes: RouteTableMessage
    keys: KeyTableMessage
    prices: Prices = Prices()
    trace_ratio: float | None = None
    transcripts: tuple[str, frozenset[str]] | None = None


class OtherLoads(msgspec.Struct, frozen=True, tag=True):
    """Requests in flight at the other workers, by replica id. `kept_places`: free places that they
    keep for earlier classes."""

    in_flight: dict[str, int]
    kept_places: dict[str, int] = {}


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """The command to take no more connections, and to end after the present ones or after
    `within_s`."""

    within_s: float


class RequestsQuery(msgspec.Struct, frozen=True, tag=True):
    """Question for the requests in flight. `cancel`: requests with this id end first; empty:
    none."""

    cancel: str = ""


class RequestsReport(msgspec.Struct, frozen=True, tag=True):
    """Answer to `RequestsQuery`. `cancelled`: number of requests ended."""

    requests: RequestsInFlight
    cancelled: int


class ReplicaLoad(msgspec.Struct, frozen=True, array_like=True):
    """A worker's requests in flight at one replica. `silent_s`: seconds since the replica gave it a
    byte."""

    requests: int
    silent_s: float


class Report(msgspec.Struct, frozen=True, tag=True):
    """State of a worker.

    loads: the load of each replica, by its id.
    samples: all its metrics, None: unchanged.
    tables: number of route tables applied.
    waiting: models with waiting requests, and the seconds of the oldest.
    usage: counts since the last report.
    spans: ended requests since the last report (`gateway.proxy.tracing.request_span`).
    kept_places: free places of replicas that the worker keeps for earlier classes.
    """

    loads: dict[str, ReplicaLoad]
    samples: tuple[Sample, ...] | None
    tables: int = 0
    waiting: dict[str, float] = {}
    usage: tuple[UsageRow, ...] = ()
    kept_places: dict[str, int] = {}
    spans: tuple[tuple[Any, ...], ...] = ()


ToWorker = (
    WorkerSetup
    | RouteTableMessage
    | KeyTableMessage
    | OtherLoads
    | NewCertificate
    | Shutdown
    | RequestsQuery
)
FromWorker = Report | RequestsReport


def _secret(kind: type, data: object) -> Any:
    if kind is Secret and isinstance(data, str):
        return Secret(data)
    raise NotImplementedError(kind)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=secret_text)
_WORKER_DECODER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(
    ToWorker, dec_hook=_secret
)
_CONTROL_DECODER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


class Channel:
    """An end of the connection, in an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> Channel:
        return cls(*await asyncio.open_unix_connection(sock=end))

    def send(self, message: ToWorker | FromWorker) -> None:
        """Queue a message without waiting for the other end."""
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    @property
    def unread_bytes(self) -> int:
        """Bytes sent and not yet read by the other end."""
        return self._writer.transport.get_write_buffer_size()

    async def read_command(self) -> ToWorker:
        """The next message. Raises EOFError at the end, OSError, msgspec.ValidationError."""
        return _WORKER_DECODER.decode(await self._receive())

    async def read_report(self) -> FromWorker:
        """The next message. Raises EOFError at the end, OSError, msgspec.ValidationError."""
        return _CONTROL_DECODER.decode(await self._receive())

    def close(self) -> None:
        self._writer.transport.abort()

    async def _receive(self) -> bytes:
        # IncompleteReadError is an EOFError.
        length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
        return await self._reader.readexactly(length)


def frame(message: ToWorker | FromWorker) -> bytes:
    data = _ENCODER.encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


def receive_begin(end: socket.socket) -> WorkerSetup:
    """The first message, read before an event loop exists. Raises EOFError,
    msgspec.ValidationError."""
    length = int.from_bytes(_exactly(end, _LENGTH_BYTES), "big")
    return msgspec.msgpack.decode(_exactly(end, length), type=WorkerSetup, dec_hook=_secret)


def _exactly(end: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = end.recv(length - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def build_route_message(table: RouteTable) -> RouteTableMessage:
    """The message for a table. Text of an engine that cannot be encoded is replaced. A replica with
    such a model name is dropped, because no client could name it."""
    return RouteTableMessage(
        tuple(
            replace(
                route,
                detail=_encodable_text(route.detail),
                replicas=tuple(
                    replica
                    for replica in route.replicas
                    if replica.served_name == _encodable_text(replica.served_name)
                ),
            )
            for route in table.models.values()
        )
    )


def _encodable_text(text: str) -> str:
    return text.encode(errors="replace").decode()


def build_key_message(keys: Keys, rows: LimitRows) -> KeyTableMessage:
    valid = tuple(keys.table.keys.values())
    # A worker without any key would be open to all, though people have to sign in.
    is_closed = keys.table.is_closed or keys.has_identities
    return KeyTableMessage(valid, is_closed, rows.assign(valid))
