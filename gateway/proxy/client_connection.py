"""The connection of a client, from accept to close: requests come in, and answers go out in turn.
Inference requests never become ASGI,
but an `Exchange`; all others become an `AsgiRequest`. Both take turns here, and neither touches the
connection itself.

phase       what comes next                                      too long (gateway.proxy.limits)
new         the first byte                                       closed
head        the rest of a request's head                         408, closed
body        the next piece of its body                           408, closed
answering   the end of the answer; the client may send on        closed when it takes nothing
idle        the next request                                     closed
lingering   nothing: what still comes is discarded               closed

Requests of one connection are answered one after the other, in order. `_current` has its turn;
requests that came with it in one read wait in `_turns`, and nothing more is read until their turn
comes: the kernel keeps the rest. A request that cannot be read ends the connection: its refusal is
written after the answers to the requests before it (`_last_words`), and the connection lingers
(`_close`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from collections import deque
from typing import Any, ClassVar

from uvicorn.config import Config
from uvicorn.server import ServerState

from gateway.errors import FitserveError
from gateway.proxy import head_cache, limits, refusals
from gateway.proxy.api.endpoints import Shape
from gateway.proxy.api.protocol import answer, dump, envelope, error_headers, new_id
from gateway.proxy.asgi_request import AsgiRequest
from gateway.proxy.data_plane import DataPlane
from gateway.proxy.exchange import Exchange
from gateway.proxy.request_reader import RequestReader
from gateway.proxy.routing.table import models_answer
from gateway.tls import Handshake, peer_address

log = logging.getLogger(__name__)

# What one read brings, of any connection: each takes its own before the next is read. So a read
# finds its memory whatever else there is, and who is refused for want of memory comes to read that.
_READ = memoryview(bytearray(256 * 1024))


def client_protocol(plane: DataPlane, tls: ssl.SSLContext | None = None) -> type[asyncio.Protocol]:
    """The protocol class for `uvicorn.Config(http=...)`: uvicorn makes one object per connection,
    all of which share `plane`."""
    made = type("ClientConnection", (ClientConnection,), {"shared": plane, "__slots__": ()})
    if tls is None:
        return made  # uvicorn knows no other word for the BufferedProtocol that it is
    return type(
        "ClientHandshake",
        (Handshake,),
        {"behind": made, "context": tls, "limiter": plane.connection_limiter},
    )


class ClientConnection(asyncio.BufferedProtocol):
    """One client's connection."""

    __slots__ = (
        *(
            "_current",
            "_holds_up",
            "_last_words",
            "_loop",
            "_reader",
            "_repeat",
            "_stall",
            "_turns",
        ),
        *(
            "address",
            "app_state",
            "config",
            "deadline",
            "discarding",
            "place",
            "plane",
            "server_state",
            "transport",
            "unread",
        ),
    )
    shared: ClassVar[DataPlane]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.plane = self.shared
        self.config = config
        self.server_state = server_state
        self.app_state = app_state
        self.transport: asyncio.Transport
        self._loop = _loop or asyncio.get_running_loop()
        self._reader = RequestReader(self)
        self._current: Exchange | AsgiRequest | None = None  # the request that has its turn
        self._repeat: head_cache.KnownRequestHead | None = None  # the head of the request before
        self._turns: deque[Exchange | AsgiRequest] = deque()
        self._last_words = b""  # a refusal, to be written after the answers that are due
        self.deadline = math.inf
        self._stall: limits.Stall | None = None
        self.discarding = False  # what still comes is discarded
        # the body that comes in has to wait: for room, for a replica, or for who reads it
        self._holds_up = False
        self.unread = False  # nothing is read, for the body or for a turn
        self.address = ""
        self.place: limits.Place | None = None  # a handshake before has got one

    # --- the transport's side ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.server_state.connections.add(self)  # type: ignore[arg-type]
        self.transport = transport
        self.address = peer_address(transport)
        self.plane.opened(self, self._loop)
        self.deadline = self._loop.time() + limits.FIRST_BYTE_S
        if self.place is None:
            self.place = self.plane.connection_limiter.come(self.address)
        if self.place == "refused":
            self.hang_up(refusals.too_many_connections())
        elif self.place == "out":
            transport.abort()

    def connection_lost(self, _: Exception | None) -> None:
        self.plane.connection_limiter.left(self.address, self.place or "out")
        self.plane.connections.discard(self)
        self.server_state.connections.discard(self)
        for request in (self._current, self._reader.incoming, *self._turns):
            if request is not None:
                request.leave()
        self._current = None
        self._turns.clear()
        self._reader.close()

    def get_buffer(self, _: int) -> memoryview:
        return _READ

    def buffer_updated(self, count: int) -> None:
        reader = self._reader
        if self.discarding:
            reader.throw_away(count)
            return
        kept: bytes | None = None
        if not (reader.in_head or reader.in_body or self._busy()):
            try:
                kept = bytes(_READ[:count])
                if self._repeats(kept):
                    return
            except MemoryError:
                # its head is read all the same: only that tells how much comes before the client
                # reads its refusal
                kept = None
        if (
            reader.read(_READ[:count] if kept is None else kept)
            and kept is not None
            and isinstance(self._current, Exchange)
        ):
            self._repeat = head_cache.remember(kept, self._current, self.plane.keys.table)
        if self._turns and not self.discarding:
            self._steer()

    def _repeats(self, data: bytes) -> bool:
        """Whether `data` was a request with the head of the request before; that head need not be
        read again."""
        repeat = self._repeat
        if repeat is None or repeat.keys is not self.plane.keys.table or self.plane.leaving:
            return False
        body = repeat.body(data)
        if body is None or len(body) > self.plane.limits.body_bytes:
            return False
        self.deadline = math.inf
        exchange = self._current = Exchange(
            self.plane,
            self,
            repeat.endpoint,
            repeat.found,
            repeat.key,
            new_id(),
            True,
            True,
            repeat.lines,
            body,
            whole=True,
        )
        self._run(exchange)
        return True

    @property
    def write_paused(self) -> bool:
        """Whether the client has yet to take what is written."""
        return self._stall is not None

    def pause_writing(self) -> None:
        self._stall = limits.Stall(self.transport, self._loop.time())
        self._steer()
        if self._current is not None:
            self._current.pause()

    def resume_writing(self) -> None:
        if self.transport.is_closing():
            return  # see `_end`
        self._stall = None
        self._steer()
        if self._current is not None:
            self._current.resume()

    # --- requests, as they come in: as fast as there is room, and as they are taken ---

    @property
    def ahead(self) -> int:
        """How many requests wait for their turn."""
        return len(self._turns)

    def arrived(self, request: Exchange | AsgiRequest) -> None:
        """The head of a request is complete."""
        if self._busy():
            self._turns.append(request)
        else:
            self._begin(request)

    def completed(self, request: Exchange | AsgiRequest | None) -> None:
        """All of a request was read. None: of one that nobody waits for any more."""
        self._holds_up = False
        self.deadline = math.inf
        if request is None:
            return
        request.complete()
        if request is not self._current:
            request.keep_body()
        elif isinstance(request, Exchange) and request.state == "reading":
            self._run(request)
        if self.unread:
            self._steer()

    def read_on(self, request: Exchange | AsgiRequest) -> None:
        """More of the body is to come: the request goes on as soon as it can."""
        try:
            if request is not self._current:
                request.keep_body()
            elif isinstance(request, Exchange) and request.may_start():
                self._run(request)
                if request.state in ("connecting", "queued"):
                    self.pause_upload()
            elif not request.has_room():
                self.pause_upload()
        except FitserveError as error:
            self.hang_up(error, request.shape, request.id)

    def pause_upload(self) -> None:
        """Whoever takes the body is slow, or there is no room: the client is read as slowly."""
        if self._reader.in_body:
            self._holds_up = True
            self._steer()

    def resume_upload(self) -> None:
        if self._holds_up:
            self._holds_up = False
            self._steer()

    def _steer(self) -> None:
        """Reads, or does not. What is not read has no time either."""
        # Who takes no answer asks nothing more; but for a body, which many clients send before they
        # read.
        unread = (
            self._holds_up
            or bool(self._turns)
            or (self.write_paused and not self._reader.in_body and not self.discarding)
        )
        if unread == self.unread or self.transport.is_closing():
            return
        self.unread = unread
        if unread:
            self.transport.pause_reading()
            self.deadline = math.inf
        else:
            self.transport.resume_reading()
            if self._reader.in_body or self._reader.in_head:
                self.deadline = self._loop.time() + (
                    limits.BODY_S if self._reader.in_body else limits.HEAD_S
                )
            elif not self._busy():
                self.deadline = self._loop.time() + self.plane.keep_alive_s

    # --- answers, in turn ---

    def _busy(self) -> bool:
        return self._current is not None or bool(self._turns)

    def _begin(self, request: Exchange | AsgiRequest) -> None:
        """It is the turn of `request`."""
        self._current = request
        if isinstance(request, AsgiRequest):
            request.start()
        elif request.whole:
            self._loop.call_soon(self._run, request)
        elif b"expect" in request.found and request.found[b"expect"].lower() == b"100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _run(self, exchange: Exchange) -> None:
        """Enough of the body of `exchange`, whose turn it is, is here."""
        if self.transport.is_closing() or exchange is not self._current:
            # the client was found gone when the answer before was written, or somebody has ended
            # this request
            return
        try:
            if exchange.endpoint.at == "models":
                body = dump(
                    models_answer(self.plane.routes.table, exchange.endpoint.id, exchange.key)
                )
                self.transport.write(
                    answer(200, body, exchange.id, self._headers(keep=exchange.keep))
                )
                self.answered(exchange)
            else:
                exchange.start()
        except FitserveError as error:
            exchange.fail(error)
        except Exception:
            log.exception("%s: a bug in the data plane", exchange.id)
            exchange.fail(refusals.failed())

    def refuse(self, exchange: Exchange, error: FitserveError) -> None:
        """Answers with an error of the gateway's own. Only for an exchange whose answer has not
        started."""
        self.plane.meter.refused(exchange, error)
        self.transport.write(self._refusal(error, exchange.shape, exchange.id, keep=exchange.keep))
        self.answered(exchange)

    def answered(self, request: Exchange | AsgiRequest) -> None:
        """The answer to `request` is written, or broken off."""
        self.server_state.total_requests += 1
        self._current = None
        if request.held:
            request.release_body()
        if request.keep and request.whole:
            self._next()
        else:
            self._close(discard=not request.whole)

    def broke_off(self, request: AsgiRequest) -> None:
        """The answer to `request` cannot be completed."""
        if request is self._current:
            self._cut()

    def _next(self) -> None:
        """Whose turn is it?"""
        if self._turns:
            self._begin(self._turns.popleft())
            if self.unread:
                self._steer()
        elif self._last_words:
            self.transport.write(self._last_words)
            self._close(discard=True)
        elif not self._reader.in_head and not self._reader.in_body:
            self.deadline = self._loop.time() + self.plane.keep_alive_s

    def hang_up(
        self, error: FitserveError, shape: Shape = "openai", id_: str | None = None
    ) -> None:
        """Refuses the request that comes in, once those before it are answered. Nothing more is
        read."""
        self.discarding = True
        self.deadline = math.inf
        id_ = id_ or new_id()
        self.plane.meter.turned_away(error, id_, self.address)
        refusal = self._refusal(error, shape, id_, keep=False)
        if self._reader.method == b"HEAD":
            # The length is told and the body is not sent.
            refusal = refusal[: refusal.find(b"\r\n\r\n") + 4]
        incoming, self._reader.incoming = self._reader.incoming, None
        if incoming is not None:
            started = incoming.status
            incoming.leave()
            if incoming is self._current:
                self._current = None
                if started:
                    self._cut()
                    return
            else:
                self._turns.remove(incoming)
        if self._busy():
            self._last_words = refusal
        elif not self.transport.is_closing():
            self.transport.write(refusal)
            self._close(discard=True)

    def give_up(self, request: Exchange | AsgiRequest, error: FitserveError) -> None:
        """The request that comes in is refused, wherever it stands."""
        if request is self._reader.incoming:
            self.hang_up(error, request.shape, request.id)

    def _refusal(self, error: FitserveError, shape: Shape, id_: str, *, keep: bool) -> bytes:
        body = dump(envelope(error, shape))
        return answer(error.status, body, id_, [*self._headers(keep=keep), *error_headers(error)])

    def _headers(self, *, keep: bool) -> list[tuple[bytes, bytes]]:
        """Of an answer of the gateway's own."""
        own = (
            self.server_state.default_headers
            if keep
            else [*self.server_state.default_headers, (b"connection", b"close")]
        )
        if self.plane.origins is not None:
            origin = next(
                (value for name, value in self._reader.headers if name == b"origin"), None
            )
            own = [*own, *self.plane.origins.headers(origin)]
        return own

    def _close(self, *, discard: bool) -> None:
        """Ends the connection after what is written. `discard`: the client may still be sending;
        closed at once, the kernel
        would throw the answer away."""
        if discard and not self.transport.is_closing():
            self.discarding = True
            self._holds_up = False
            self._steer()
            if self.transport.can_write_eof():  # not through TLS
                self.transport.write_eof()
            self.deadline = self._loop.time() + limits.LINGER_S
        else:
            self._end()

    def _end(self) -> None:
        """Closes once the client has taken what is written, which it may never do."""
        self.transport.close()
        if self._stall is None:
            self._stall = limits.Stall(self.transport, self._loop.time())

    def _cut(self) -> None:
        """Closes at once, and lets go of the engine: until the loop says that the connection is
        lost, the engine could write to it."""
        request, self._current = self._current, None
        if request is not None:
            request.leave()
        self.transport.abort()

    # --- time ---

    def sweep(self, now: float) -> None:
        """Ends what takes too long."""
        if now >= self.deadline:
            self.deadline = math.inf
            if self.discarding:
                self._cut()
            elif self._reader.in_head or self._reader.in_body:
                self.hang_up(refusals.too_slow())
            else:
                self._end()
        elif (self._stall is not None and self._stall.over(now)) or (
            self.unread and limits.has_left(self.transport)
        ):
            self._cut()
        if self._current is not None:
            self._current.sweep(now)

    def shutdown(self) -> None:
        """The server stops: the answer that has its turn is finished, nothing new begins."""
        if self._turns:
            self._reader.incoming = None
        while self._turns:
            self._turns.pop().leave()
        if self._current is not None:
            self._current.keep = False
        else:
            self._end()

    @property
    def exchange(self) -> Exchange | None:
        """The inference request that has its turn."""
        return self._current if isinstance(self._current, Exchange) else None

    def leave(self) -> None:
        """Another gateway takes new connections. Closed at once, a request that is on its way would
        meet a closed door."""
        if not (self._reader.in_head or self._reader.in_body or self.discarding or self._busy()):
            self.deadline = min(self.deadline, self._loop.time() + self.plane.keep_alive_s)

    def stop(self) -> None:
        """The time to finish is over."""
        if self._current is not None:
            self._current.stop()
