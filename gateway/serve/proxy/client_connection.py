"""The connection of a client, from accept to close: requests come in, and answers go out in turn. Inference requests never become ASGI,
but an `Exchange`; all others become an `AsgiRequest`. Both take turns here, and neither touches the connection itself.

phase       what comes next                                      too long (gateway.serve.proxy.limits)
new         the first byte                                       closed
head        the rest of a request's head                         408, closed
body        the next piece of its body                           408, closed
answering   the end of the answer; the client may send on        closed when it takes nothing
idle        the next request                                     closed
lingering   nothing: what still comes is discarded               closed

Requests of one connection are answered one after the other, in order. `_current` has its turn; requests that came with it in one read wait
in `_turns`, and nothing more is read until their turn comes: the kernel keeps the rest. A request that cannot be read ends the connection:
its refusal is written after the answers to the requests before it (`_last_words`), and what the client still sends is discarded for a
moment, because the kernel would throw the refusal away with a connection that is closed at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from typing import Any, ClassVar

import httptools
from uvicorn.config import Config
from uvicorn.server import ServerState

from gateway.access.auth import Key
from gateway.api import endpoints
from gateway.api.endpoints import Shape
from gateway.api.protocol import answer, dump, envelope, error_headers, known_id, new_id, too_large
from gateway.errors import BadRequest, Busy, FitserveError, TooSlow
from gateway.routing.table import models_answer
from gateway.serve.proxy import head_cache, limits
from gateway.serve.proxy.asgi_request import AsgiRequest
from gateway.serve.proxy.data_plane import DataPlane
from gateway.serve.proxy.exchange import Exchange
from gateway.serve.proxy.heads import head_without_upgrade, request_lines, upgrade_of

log = logging.getLogger(__name__)


def client_protocol(plane: DataPlane) -> type[ClientConnection]:
    """The protocol class for `uvicorn.Config(http=...)`: uvicorn makes one object per connection, all of which share `plane`."""
    return type("ClientConnection", (ClientConnection,), {"shared": plane, "__slots__": ()})


class ClientConnection(asyncio.Protocol):
    """One client's connection."""

    __slots__ = (
        *(
            "_current",
            "_deadline",
            "_discarding",
            "_holds_up",
            "_ignores_upgrade",
            "_in_body",
            "_in_head",
            "_incoming",
            "_last_words",
        ),
        *("_loop", "_parser", "_received", "_repeat", "_size", "_stall", "_turns", "_unread", "_wire"),
        *("address", "app_state", "config", "headers", "plane", "server_state", "transport", "url"),
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
        self._parser = self._new_parser()
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self._current: Exchange | AsgiRequest | None = None  # the request that has its turn
        self._incoming: Exchange | AsgiRequest | None = None  # the request that is being read
        self._repeat: head_cache.KnownRequestHead | None = None  # the head of the request before
        self._turns: deque[Exchange | AsgiRequest] = deque()
        self._last_words = b""  # a refusal, to be written after the answers that are due
        self._deadline = math.inf
        self._stall: limits.Stall | None = None
        self._in_head = self._in_body = False
        self._size = 0  # bytes so far of the head or body that comes in
        self._wire = 0  # bytes of the reads that bring the body alone, with its chunks' heads and trailers; -1: none was yet
        self._received = 0  # bytes of this read, and of the reads before that the head came in; of all that is discarded
        self._discarding = False  # what still comes is discarded
        self._ignores_upgrade = False
        self._holds_up = False  # the body that comes in has to wait: for room, for a replica, or for who reads it
        self._unread = False  # nothing is read, for the body or for a turn
        self.address = ""

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # An answer with `connection: close` does not end the reading of what came with its request.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    # --- the transport's side ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.server_state.connections.add(self)  # type: ignore[arg-type]
        self.transport = transport
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if isinstance(peer, tuple) else ""
        self.plane.opened(self, self._loop)
        self._deadline = self._loop.time() + limits.FIRST_BYTE_S
        if not self.plane.connection_limiter.admit(self.address):
            if self.plane.connection_limiter.flooded():
                transport.abort()
            else:
                self._hang_up(Busy("The gateway has too many connections.", hint="Try again in a second.", retry_after_s=1))

    def connection_lost(self, _: Exception | None) -> None:
        self.plane.connection_limiter.left(self.address)
        self.plane.connections.discard(self)
        self.server_state.connections.discard(self)
        self._deadline = math.inf
        for request in (self._current, self._incoming, *self._turns):
            if request is not None:
                request.leave()
        self._current = self._incoming = None
        self._turns.clear()
        self._parser = None  # type: ignore[assignment]  # it holds this connection

    def data_received(self, data: bytes) -> None:
        waiting = not (self._in_head or self._in_body or self._discarding or self._busy())
        if waiting and self._repeats(data):
            return
        if self._discarding:
            self._throw_away(len(data))
            return
        was_in_head = self._in_head
        self._received = len(data) + (self._received if was_in_head else 0)
        if not self._parse(data):
            return
        if self._in_head:
            if not was_in_head:
                self._size = 0
                self._deadline = self._loop.time() + limits.HEAD_S
            self._size += len(data) if was_in_head else 0
            if self._size > limits.HEAD_BYTES:
                self._hang_up(limits.head_too_large())
        elif self._in_body:
            self._body_received(len(data))
        elif waiting and isinstance(self._current, Exchange):
            self._repeat = head_cache.remember(data, self._current, self.plane.keys.table)
        if self._turns:
            self._steer()

    def _throw_away(self, count: int) -> None:
        """A refused client sends on: as much as it announced is read, so that it comes to read its refusal, and little more."""
        self._received += count
        announced = next((int(value) for name, value in self.headers if name == b"content-length" and value.isdigit()), 0)
        if self._received > announced + limits.DISCARDED_BYTES and self.transport.is_reading():
            self.transport.pause_reading()  # until its time is over

    def _body_received(self, count: int) -> None:
        """A read of `count` bytes ended within a body."""
        first = self._wire < 0
        if not self._unread:
            latest = self._loop.time() + limits.BODY_S
            self._deadline = latest if first else min(self._deadline + count / limits.LEAST_BYTES_S, latest)
        self._wire = 0 if first else self._wire + count
        if self._wire > limits.most_on_the_wire(self._size):
            self._hang_up(limits.framing_too_large())
            self.transport.pause_reading()  # no honest client goes on like this
        elif self._incoming is not None:
            self._read_on(self._incoming)

    def _repeats(self, data: bytes) -> bool:
        """Whether `data` was a request with the head of the request before; that head need not be read again."""
        repeat = self._repeat
        if repeat is None or repeat.keys is not self.plane.keys.table or self.plane.leaving:
            return False
        body = repeat.body(data)
        if body is None or len(body) > self.plane.limits.body_bytes:
            return False
        self._deadline = math.inf
        exchange = self._current = Exchange(
            self.plane, self, repeat.endpoint, repeat.found, repeat.key, new_id(), True, True, repeat.lines, body, whole=True
        )
        self._run(exchange)
        return True

    def _parse(self, data: bytes) -> bool:
        """Whether what comes next is still for this parser."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._ignores_upgrade:
                self._read_again(data[upgrade.args[0] :])
            return False
        except httptools.HttpParserError as error:
            log.debug("not HTTP: %r", error)
            if self._discarding:  # the same bytes may have been refused already, for what came before the garbage
                pass
            elif isinstance(error.__context__, MemoryError):
                self._hang_up(
                    Busy("The gateway has no memory for this request.", hint="Try again in a second.", retry_after_s=1)
                )
            else:
                hint = "Check the client, and what is between it and here."
                self._hang_up(BadRequest("What was sent is not an HTTP request.", hint=hint))
        return not self._discarding

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
        self._stall = None
        self._steer()
        if self._current is not None:
            self._current.resume()

    # --- the parser's side ---

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else a trailer, which nobody here reads
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._discarding:
            return
        self._in_head = False
        self._in_body = True
        self._size, self._wire = 0, -1
        self._incoming = None
        method = self._parser.get_method()
        upgrade = upgrade_of(self.headers) if self._parser.should_upgrade() and method != b"CONNECT" else None
        self._ignores_upgrade = upgrade is not None and upgrade != b"websocket"
        if self._ignores_upgrade:
            return
        endpoint = endpoints.USUAL.get((method, self.url))
        shape: Shape = "openai" if endpoint is None else endpoint.shape
        id_ = None
        request: Exchange | AsgiRequest
        try:
            if upgrade is not None:
                raise BadRequest("There are no websockets here.", hint='Ask with "stream": true for events as they come.')
            if len(self._turns) >= limits.PIPELINED:
                raise BadRequest("Too many requests wait on this connection.", hint="Use more connections.")
            version = self._parser.get_http_version()
            found = limits.read_head(self.url, self.headers, version, self._received)
            id_ = known_id(found.get(b"x-request-id")) or new_id()
            if int(found.get(b"content-length", b"0")) > self.plane.limits.body_bytes:
                raise too_large(self.plane.limits.body_bytes)
            keep = version == "1.1" and self._parser.should_keep_alive() and not self.plane.leaving
            if endpoint is None:
                path, query = endpoints.split(self.url)
                if endpoints.is_inference(path) and not self._preflight(method):
                    shape = endpoints.shape_of(path)
                    key = self._admit(found)
                    endpoint = endpoints.find(path, query, method.decode())
            else:
                key = self._admit(found)
            if endpoint is None:
                expects = found.get(b"expect", b"").lower() == b"100-continue"
                request = AsgiRequest(self, method, self.url, version, self.headers, id_, expects=expects, keep=keep)
            else:
                request = Exchange(self.plane, self, endpoint, found, key, id_, keep, version != "1.0", request_lines(found))
        except FitserveError as error:
            self._hang_up(error, shape, id_)
            return
        self._incoming = request
        if self._busy():
            self._turns.append(request)
        else:
            self._begin(request)

    def _read_again(self, rest: bytes) -> None:
        """The request asked for a protocol that is not spoken here, as Java's HTTP client does (h2c). It is read as if it had not;
        the parser has left the body alone."""
        head = head_without_upgrade(self._parser.get_method(), self.url, self._parser.get_http_version(), self.headers)
        self._parser = self._new_parser()
        self.data_received(head + rest)

    def _preflight(self, method: bytes) -> bool:
        """Whether a browser asks what a page may do. It sends no key with that, and the application answers for all paths."""
        asks = any(name == b"access-control-request-method" for name, _ in self.headers)
        return method == b"OPTIONS" and self.plane.origins is not None and asks

    def _admit(self, found: dict[bytes, bytes]) -> Key:
        if b"x-api-key" in found and b"authorization" not in found:
            found[b"authorization"] = b"Bearer " + found[b"x-api-key"]
        return self.plane.keys.who(found, "inference", self.address)

    def on_body(self, data: bytes) -> None:
        request = self._incoming
        if self._discarding or request is None:
            return
        self._size += len(data)
        try:
            if self._size > self.plane.limits.body_bytes:
                raise too_large(self.plane.limits.body_bytes)
            request.more(data)
        except FitserveError as error:
            self._hang_up(error, request.shape, request.id)

    def on_message_complete(self) -> None:
        if self._discarding or self._ignores_upgrade:
            return
        self._in_body = self._holds_up = False
        self._deadline = math.inf
        request, self._incoming = self._incoming, None
        if request is None:
            return
        request.complete()
        if request is not self._current:
            request.keep_body()
        elif isinstance(request, Exchange) and request.state == "reading":
            self._run(request)
        if self._unread:
            self._steer()

    # --- bodies: as fast as there is room, and as they are taken ---

    def _read_on(self, request: Exchange | AsgiRequest) -> None:
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
            self._hang_up(error, request.shape, request.id)

    def pause_upload(self) -> None:
        """Whoever takes the body is slow, or there is no room: the client is read as slowly."""
        if self._in_body:
            self._holds_up = True
            self._steer()

    def resume_upload(self) -> None:
        if self._holds_up:
            self._holds_up = False
            self._steer()

    def _steer(self) -> None:
        """Reads, or does not. What is not read has no time either."""
        # Who takes no answer asks nothing more; but for a body, which many clients send before they read.
        unread = self._holds_up or bool(self._turns) or (self.write_paused and not self._in_body and not self._discarding)
        if unread == self._unread or self.transport.is_closing():
            return
        self._unread = unread
        if unread:
            self.transport.pause_reading()
            self._deadline = math.inf
        else:
            self.transport.resume_reading()
            if self._in_body or self._in_head:
                self._deadline = self._loop.time() + (limits.BODY_S if self._in_body else limits.HEAD_S)
            elif not self._busy():
                self._deadline = self._loop.time() + self.plane.keep_alive_s

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
        if self.transport.is_closing():
            return  # the client was found gone when the answer before was written; `connection_lost` comes next
        try:
            if exchange.endpoint.at == "models":
                body = dump(models_answer(self.plane.routes.table, exchange.endpoint.id, exchange.key))
                self.transport.write(answer(200, body, exchange.id, self._headers(keep=exchange.keep)))
                self.answered(exchange)
            else:
                exchange.start()
        except FitserveError as error:
            self.refuse(exchange, error)
        except Exception:
            log.exception("%s: a bug in the data plane", exchange.id)
            self.refuse(exchange, FitserveError("The gateway failed at this request.", hint="Its log says why."))

    def refuse(self, exchange: Exchange, error: FitserveError) -> None:
        """Answers with an error of the gateway's own. Only for an exchange whose answer has not started."""
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
            if self._unread:
                self._steer()
        elif self._last_words:
            self.transport.write(self._last_words)
            self._close(discard=True)
        elif not self._in_head and not self._in_body:
            self._deadline = self._loop.time() + self.plane.keep_alive_s

    def _hang_up(self, error: FitserveError, shape: Shape = "openai", id_: str | None = None) -> None:
        """Refuses the request that comes in, once those before it are answered. Nothing more is read."""
        self._discarding = True
        self._deadline = math.inf
        id_ = id_ or new_id()
        self.plane.meter.turned_away(error, id_, self.address)
        refusal = self._refusal(error, shape, id_, keep=False)
        if self._parser.get_method() == b"HEAD":
            # The length is told and the body is not sent.
            refusal = refusal[: refusal.find(b"\r\n\r\n") + 4]
        incoming, self._incoming = self._incoming, None
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
        if request is self._incoming:
            self._hang_up(error, request.shape, request.id)

    def _refusal(self, error: FitserveError, shape: Shape, id_: str, *, keep: bool) -> bytes:
        body = dump(envelope(error, shape))
        return answer(error.status, body, id_, [*self._headers(keep=keep), *error_headers(error)])

    def _headers(self, *, keep: bool) -> list[tuple[bytes, bytes]]:
        """Of an answer of the gateway's own."""
        own = self.server_state.default_headers if keep else [*self.server_state.default_headers, (b"connection", b"close")]
        if self.plane.origins is not None:
            own = [*own, *self.plane.origins.headers(next((value for name, value in self.headers if name == b"origin"), None))]
        return own

    def _close(self, *, discard: bool) -> None:
        """Ends the connection after what is written. `discard`: the client may still be sending; closed at once, the kernel
        would throw the answer away."""
        if discard and not self.transport.is_closing():
            self._discarding = True
            self._holds_up = False
            self._steer()
            if self.transport.can_write_eof():  # not through TLS
                self.transport.write_eof()
            self._deadline = self._loop.time() + limits.LINGER_S
        else:
            self.transport.close()

    def _cut(self) -> None:
        """Closes at once. The engine is let go of now, not when the loop says that the connection is lost: until then it could
        write to what is closed."""
        request, self._current = self._current, None
        if request is not None:
            request.leave()
        self.transport.abort()

    # --- time ---

    def sweep(self, now: float) -> None:
        """Ends what takes too long."""
        if now >= self._deadline:
            self._deadline = math.inf
            if self._discarding:
                self._cut()
            elif self._in_head or self._in_body:
                self._hang_up(TooSlow("The request did not come in within its time.", hint="Send it without pauses."))
            else:
                self.transport.close()
        elif (self._stall is not None and self._stall.over(now)) or (self._unread and limits.has_left(self.transport)):
            self._cut()
        if self._current is not None:
            self._current.sweep(now)

    def shutdown(self) -> None:
        """The server stops: the answer that has its turn is finished, nothing new begins."""
        if self._turns:
            self._incoming = None
        while self._turns:
            self._turns.pop().leave()
        if self._current is not None:
            self._current.keep = False
        else:
            self.transport.close()

    @property
    def exchange(self) -> Exchange | None:
        """The inference request that has its turn."""
        return self._current if isinstance(self._current, Exchange) else None

    def leave(self) -> None:
        """Another gateway takes new connections. Closed at once, a request that is on its way would meet a closed door."""
        if not (self._in_head or self._in_body or self._discarding or self._busy()):
            self._deadline = min(self._deadline, self._loop.time() + self.plane.keep_alive_s)

    def stop(self) -> None:
        """The time to finish is over."""
        if self._current is not None:
            self._current.stop()
