"""The connection of a client, from accept to close: requests are read and answered in order.

Inference requests become an `Exchange`, all others an `AsgiRequest`. Both take turns here, and
neither touches the connection itself.

phase       next                                                 after too long (`limits.py`)
new         the first byte                                       closed
head        the rest of a request's head                         408, closed
body        the next piece of its body                           408, closed
answering   the end of the answer; further requests may arrive   closed if the client reads nothing
idle        the next request                                     closed
lingering   nothing: further bytes are discarded                 closed

Requests of one connection are answered in order. `_current_exchange` is being answered. Further
requests of the same read wait in `_turns`, and nothing more is read meanwhile: the kernel keeps the
rest. The next turn begins when the client has received nearly all of the answer before. An
unreadable request ends the connection: its refusal (`_pending_refusal`) is written after the
answers to earlier requests, and the connection lingers (`_close`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from gateway.errors import FitserveError
from gateway.proxy import head_cache, limits, refusals
from gateway.proxy.api.endpoints import Shape
from gateway.proxy.api.protocol import answer, dump, envelope, error_headers, new_id
from gateway.proxy.asgi_request import PIECE_BYTES, AsgiRequest
from gateway.proxy.data_plane import DataPlane
from gateway.proxy.exchange import Exchange
from gateway.proxy.request_reader import RequestReader
from gateway.proxy.tls import Handshake, peer_address
from gateway.proxy.upload import Upload

log = logging.getLogger(__name__)

# Buffer for a read of any connection. Each connection copies its bytes before the next read.
# Allocated in advance, the buffer lets a read succeed without free memory, so that a refusal can be
# written.
_READ = memoryview(bytearray(256 * 1024))
# For a head or a chunked body, which may consist of tiny parts.
_SHORT_READ = _READ[: limits.READ_BYTES]


def client_protocol(plane: DataPlane, tls: ssl.SSLContext | None = None) -> Any:
    """The protocol factory for `uvicorn.Config(http=...)`. uvicorn creates one object per
    connection, and all share `plane`."""
    protocol = partial(ClientConnection, plane)
    if tls is None:
        return protocol
    return partial(Handshake, protocol, tls, plane.connection_limiter)


def inner_protocol(
    plane: DataPlane, config: Config, server_state: ServerState
) -> Callable[[], ClientConnection]:
    """The protocol factory for requests that the gateway makes to itself. They take no place of
    clients."""

    def connect() -> ClientConnection:
        connection = ClientConnection(plane, config, server_state, {})
        connection.admission = "internal"
        return connection

    return connect


class ClientConnection(asyncio.BufferedProtocol):
    """A connection of a client."""

    __slots__ = (
        "_current_exchange",
        "_is_upload_paused",
        "_loop",
        "_pending_refusal",
        "_reader",
        "_repeat",
        "_stall",
        "_turns",
        "_unsent",
        "address",
        "admission",
        "app_state",
        "client_address",
        "config",
        "deadline",
        "is_discarding",
        "is_reading_paused",
        "plane",
        "server_state",
        "transport",
    )

    def __init__(
        self,
        plane: DataPlane,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.plane = plane
        self.config = config
        self.server_state = server_state
        self.app_state = app_state
        self.transport: asyncio.Transport
        self._loop = _loop or asyncio.get_running_loop()
        self._reader = RequestReader(self)
        self._current_exchange: Exchange | AsgiRequest | None = None  # the request being answered
        self._repeat: head_cache.KnownRequestHead | None = None  # the head of the previous request
        self._turns: deque[Exchange | AsgiRequest] = deque()
        self._pending_refusal = b""  # a refusal, written after the answers before it
        self._unsent = memoryview(b"")  # the rest of a list of models
        self.deadline = math.inf
        self._stall: limits.ClientProgress | None = None
        self.is_discarding = False  # further bytes are discarded
        # The body being read waits for memory, for a replica, or for its reader.
        self._is_upload_paused = False
        self.is_reading_paused = False  # reading is paused, for the body or for a pipelined request
        self.address = ""
        # of the client of the last head, as a trusted proxy states it
        self.client_address = ""
        # a TLS handshake has already admitted the connection
        self.admission: limits.Admission | None = None

    def inner_connection(self) -> ClientConnection:
        """A connection for a request that the gateway makes in this client's name."""
        connection = ClientConnection(
            self.plane, self.config, self.server_state, self.app_state, self._loop
        )
        connection.address = self.address
        connection.admission = "internal"
        return connection

    # --- called by the transport ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.server_state.connections.add(self)  # type: ignore[arg-type]
        self.transport = transport
        self.address = self.client_address = self.address or peer_address(transport)
        self.plane.add_connection(self, self._loop)
        self.deadline = self._loop.time() + limits.FIRST_BYTE_S
        if self.admission is None:
            self.admission = self.plane.connection_limiter.admit(self.address)
        if self.admission == "refused":
            self.refuse_and_close(refusals.connection_limit_error())
        elif self.admission == "out":
            transport.abort()

    def connection_lost(self, _: Exception | None) -> None:
        self.plane.connection_limiter.release(self.address, self.admission or "out")
        self.plane.connections.discard(self)
        self.server_state.connections.discard(self)
        for request in (self._current_exchange, self._reader.incoming, *self._turns):
            if request is not None:
                request.abandon()
        self._current_exchange = None
        self._unsent = memoryview(b"")
        self._turns.clear()
        self._reader.close()

    def get_buffer(self, _: int) -> memoryview:
        if (remaining_bytes := self._reader.remaining_bytes) <= limits.READ_BYTES:
            return _SHORT_READ
        return _READ[:remaining_bytes]

    def buffer_updated(self, count: int) -> None:
        reader = self._reader
        if self.is_discarding:
            reader.discard(count)
            return
        data: bytes | None = None
        if not (reader.is_in_head or reader.is_in_body or self._is_busy()):
            try:
                data = bytes(_READ[:count])
                if self._repeats(data):
                    return
            except MemoryError:
                # The head is parsed all the same: its content-length says how much to discard
                # before the client reads its refusal.
                data = None
        if (
            reader.read(_READ[:count] if data is None else data)
            and data is not None
            and isinstance(self._current_exchange, Exchange)
        ):
            self._repeat = head_cache.remember(data, self._current_exchange, self.plane.keys.table)
        if not self.is_discarding:
            if self._turns:
                self._update_reading()
            if count >= limits.READ_BYTES:
                self._yield_turn()

    def _yield_turn(self) -> None:
        """Let the loop serve other connections before the next read. Otherwise the loop would read
        all bytes that the kernel has, often megabytes."""
        self.transport.pause_reading()
        self._loop.call_soon(self._continue_reading)

    def _continue_reading(self) -> None:
        if not (self.is_reading_paused or self.transport.is_closing()):
            self.transport.resume_reading()

    def _repeats(self, data: bytes) -> bool:
        """Start the request in `data` where its head equals the previous one, which need not be
        parsed again. Returns whether it did."""
        repeat = self._repeat
        if repeat is None or repeat.keys is not self.plane.keys.table or self.plane.is_draining:
            return False
        body = repeat.body(data)
        if body is None or len(body) > self.plane.limits.body_bytes:
            return False
        self.deadline = math.inf
        exchange = self._current_exchange = Exchange(
            self, repeat.meaning, new_id(), keep_alive=True, body=body, is_whole=True
        )
        self._run_exchange(exchange)
        return True

    @property
    def is_write_paused(self) -> bool:
        """Whether the client still has to receive written bytes."""
        return self._stall is not None

    def pause_writing(self) -> None:
        self._stall = limits.ClientProgress(self.transport, self._loop.time())
        self._update_reading()
        if self._current_exchange is not None:
            self._current_exchange.pause()

    def resume_writing(self) -> None:
        if self.transport.is_closing():
            return  # see `_close_when_read`
        self._stall = None
        self._update_reading()
        current_exchange = self._current_exchange
        if current_exchange is None:
            if self._turns:
                self._start_next()
        elif self._unsent and isinstance(current_exchange, Exchange):
            self._send_list(current_exchange)
        else:
            current_exchange.resume()

    # --- reading requests, at the speed of memory and of readers of bodies ---

    @property
    def pipelined_count(self) -> int:
        """The number of requests that wait for their turn."""
        return len(self._turns)

    def add_request(self, request: Exchange | AsgiRequest) -> None:
        """Start or queue a request with a complete head."""
        if self._is_busy():
            self._turns.append(request)
        else:
            self._start_request(request)

    def request_complete(self, request: Exchange | AsgiRequest | None) -> None:
        """Take the end of a request that was read in full. None: the request was already
        answered."""
        self._is_upload_paused = False
        self.deadline = math.inf
        if request is None:
            return
        request.upload.complete()
        if request is not self._current_exchange:
            request.upload.buffer_body()
        elif isinstance(request, Exchange) and request.state == "reading":
            self._run_exchange(request)
        if self.is_reading_paused:
            self._update_reading()

    def continue_request(self, request: Exchange | AsgiRequest) -> None:
        """Continue a request of which more body is to come."""
        try:
            if request is not self._current_exchange:
                request.upload.buffer_body()
            elif isinstance(request, Exchange) and request.may_start():
                self._run_exchange(request)
                if request.state in ("connecting", "queued"):
                    self.pause_upload()
            elif not request.takes_more_bytes():
                self.pause_upload()
        except FitserveError as error:
            self.refuse_and_close(error, request.shape, request.id)

    def pause_upload(self) -> None:
        """Read the client no faster than its body is taken."""
        if self._reader.is_in_body:
            self._is_upload_paused = True
            self._update_reading()

    def resume_upload(self) -> None:
        if self._is_upload_paused:
            self._is_upload_paused = False
            self._update_reading()

    def _update_reading(self) -> None:
        """Pause or resume reading. A paused client has no deadline."""
        # A client that does not read its answer gets no new request read. Its body is read on,
        # because many clients send all before they read.
        must_pause = (
            self._is_upload_paused
            or bool(self._turns)
            or (self.is_write_paused and not self._reader.is_in_body and not self.is_discarding)
        )
        if must_pause == self.is_reading_paused or self.transport.is_closing():
            return
        self.is_reading_paused = must_pause
        if must_pause:
            self.transport.pause_reading()
            self.deadline = math.inf
        else:
            self.transport.resume_reading()
            if self._reader.is_in_body or self._reader.is_in_head:
                self.deadline = self._loop.time() + (
                    limits.BODY_S if self._reader.is_in_body else limits.HEAD_S
                )
            elif not self._is_busy():
                self.deadline = self._loop.time() + self.plane.keep_alive_s

    # --- answering, in order ---

    def _is_busy(self) -> bool:
        return self._current_exchange is not None or bool(self._turns)

    def _start_request(self, request: Exchange | AsgiRequest) -> None:
        """Give `request` its turn."""
        self._current_exchange = request
        if isinstance(request, AsgiRequest):
            request.start()
        elif request.upload.is_whole:
            self._loop.call_soon(self._run_exchange, request)
        elif request.request_head.headers.get(b"expect", b"").lower() == b"100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _run_exchange(self, exchange: Exchange) -> None:
        """Run `exchange`, of whose body enough was read."""
        if self.transport.is_closing() or exchange is not self._current_exchange:
            # The connection closed while the previous answer was written, or this request was
            # ended.
            return
        try:
            if exchange.endpoint.destination == "models":
                body = exchange.list_models()
                headers = self._headers(keep_alive=exchange.keep_alive)
                self._unsent = memoryview(
                    answer(200, body, exchange.id, [*headers, *exchange.limit_headers()])
                )
                self._send_list(exchange)
            else:
                exchange.start()
        except FitserveError as error:
            exchange.fail(error)
        except Exception:
            log.exception("%s: internal error in the data plane", exchange.id)
            exchange.fail(refusals.internal_error())

    def _send_list(self, exchange: Exchange) -> None:
        """Write the list of models no faster than the client receives it."""
        while self._unsent and not self.is_write_paused and not self.transport.is_closing():
            piece = self._unsent[:PIECE_BYTES]
            self._unsent = self._unsent[PIECE_BYTES:]
            self.transport.write(piece)
        if not self._unsent:
            exchange.finish_list()
            self.finish_turn(exchange)

    def refuse(self, exchange: Exchange, error: FitserveError) -> None:
        """Answer with an error of the gateway. Only for an exchange whose answer has not
        started."""
        self.plane.meter.count_refusal(exchange, error)
        self.transport.write(
            self._refusal(error, exchange.shape, exchange.id, keep_alive=exchange.keep_alive)
        )
        self.finish_turn(exchange)

    def finish_turn(self, request: Exchange | AsgiRequest) -> None:
        """End the turn of `request`, whose answer is complete or broken off."""
        self.server_state.total_requests += 1
        self._current_exchange = None
        is_whole = request.upload.is_whole
        if request.keep_alive and is_whole:
            self._start_next()
        else:
            self._close(discards_input=not is_whole)

    def abort_answer(self, request: AsgiRequest) -> None:
        """End the connection, because the answer to `request` cannot be completed."""
        if request is self._current_exchange:
            self._abort()

    def _start_next(self) -> None:
        """Start the next request, write a pending refusal, or wait. The next request waits for a
        client that still receives the answer before."""
        if self._turns and self.is_write_paused:
            return
        if self._turns:
            self._start_request(self._turns.popleft())
            if self.is_reading_paused:
                self._update_reading()
        elif self._pending_refusal:
            self.transport.write(self._pending_refusal)
            self._close(discards_input=True)
        elif not self._reader.is_in_head and not self._reader.is_in_body:
            self.deadline = self._loop.time() + self.plane.keep_alive_s

    def refuse_and_close(
        self, error: FitserveError, shape: Shape = "openai", id_: str | None = None
    ) -> None:
        """Refuse the request being read, after the answers before it. Reads nothing more."""
        self.is_discarding = True
        self.deadline = math.inf
        id_ = id_ or new_id()
        self.plane.meter.count_rejection(error, id_, self.client_address)
        refusal = self._refusal(error, shape, id_, keep_alive=False)
        if self._reader.method == b"HEAD":
            # A refusal of HEAD has a length and no body.
            refusal = refusal[: refusal.find(b"\r\n\r\n") + 4]
        incoming = self._reader.incoming
        self._reader.incoming = None
        if incoming is not None:
            has_started = incoming.answer.has_started
            incoming.abandon()
            if incoming is self._current_exchange:
                self._current_exchange = None
                if has_started:
                    self._abort()
                    return
            else:
                self._turns.remove(incoming)
        if self._is_busy():
            self._pending_refusal = refusal
        elif not self.transport.is_closing():
            self.transport.write(refusal)
            self._close(discards_input=True)

    def reject(self, upload: Upload, error: FitserveError) -> None:
        """Refuse the request of this body if it is being read, in any state."""
        incoming = self._reader.incoming
        if incoming is not None and incoming.upload is upload:
            self.refuse_and_close(error, incoming.shape, incoming.id)

    def _refusal(self, error: FitserveError, shape: Shape, id_: str, *, keep_alive: bool) -> bytes:
        body = dump(envelope(error, shape))
        return answer(
            error.status, body, id_, [*self._headers(keep_alive=keep_alive), *error_headers(error)]
        )

    def _headers(self, *, keep_alive: bool) -> list[tuple[bytes, bytes]]:
        """Headers of an answer of the gateway's own."""
        headers = (
            self.server_state.default_headers
            if keep_alive
            else [*self.server_state.default_headers, (b"connection", b"close")]
        )
        if self.plane.origins is not None:
            origin = next(
                (value for name, value in self._reader.headers if name == b"origin"), None
            )
            headers = [*headers, *self.plane.origins.headers(origin)]
        return headers

    def _close(self, *, discards_input: bool) -> None:
        """Close the connection after all written bytes. `discards_input`: the client may still
        send; the kernel would drop the answer if the connection closed immediately."""
        if discards_input and not self.transport.is_closing():
            self.is_discarding = True
            self._is_upload_paused = False
            self._update_reading()
            if self.transport.can_write_eof():  # TLS cannot half-close
                self.transport.write_eof()
            self.deadline = self._loop.time() + limits.LINGER_S
        else:
            self._close_when_read()

    def _close_when_read(self) -> None:
        """Close once the client has received all written bytes, which may never happen."""
        self.transport.close()
        if self._stall is None:
            self._stall = limits.ClientProgress(self.transport, self._loop.time())

    def _abort(self) -> None:
        """Close immediately, and release the engine, which could write until the loop reports the
        lost connection."""
        request = self._current_exchange
        self._current_exchange = None
        if request is not None:
            request.abandon()
        self.transport.abort()

    # --- timing ---

    def sweep(self, time: float) -> None:
        """End a request or connection that has exceeded its time."""
        if time >= self.deadline:
            self.deadline = math.inf
            if self.is_discarding:
                self._abort()
            elif self._reader.is_in_head or self._reader.is_in_body:
                self.refuse_and_close(refusals.slow_request_error())
            else:
                self._close_when_read()
        elif (self._stall is not None and self._stall.is_over(time)) or (
            self.is_reading_paused and limits.has_peer_closed(self.transport)
        ):
            self._abort()
        if self._current_exchange is not None:
            self._current_exchange.sweep(time)

    def shutdown(self) -> None:
        """Finish the current answer and start nothing new, because the server stops."""
        if self._turns:
            self._reader.incoming = None
        while self._turns:
            self._turns.pop().abandon()
        if self._current_exchange is not None:
            self._current_exchange.keep_alive = False
        else:
            self._close_when_read()

    @property
    def exchange(self) -> Exchange | None:
        """The inference request being answered."""
        return self._current_exchange if isinstance(self._current_exchange, Exchange) else None

    def drain(self) -> None:
        """Keep an idle connection for a short time only, because another gateway takes new
        connections. A request already on its way would fail if it closed immediately."""
        if not (
            self._reader.is_in_head
            or self._reader.is_in_body
            or self.is_discarding
            or self._is_busy()
        ):
            self.deadline = min(self.deadline, self._loop.time() + self.plane.keep_alive_s)

    def stop(self) -> None:
        """End the current answer, because the time to finish is over."""
        if self._current_exchange is not None:
            self._current_exchange.stop()
