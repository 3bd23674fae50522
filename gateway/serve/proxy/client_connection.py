"""The connection of a client: requests come in, and answers go out in turn. As in uvicorn, except that inference requests never become ASGI,
but an `Exchange`.

phase       what comes next                                      too long (gateway.serve.proxy.limits)
new         the first byte                                       closed
head        the rest of a request's head                         408, closed
body        the next piece of its body                           408, closed
answering   the end of the answer; the client may send on        closed when it takes nothing
idle        the next request                                     closed
lingering   nothing: what still comes is discarded               closed

Requests of one connection are answered one after the other, in order. `_exchange` or `_running` (an ASGI cycle of uvicorn's) has its turn
now; requests that came early wait in `_turns`. A request that cannot be read ends the connection: its refusal is written after the answers
to the requests before it (`_last_words`), and what the client still sends is discarded for a moment, because the kernel would throw the
refusal away with a connection that is closed at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from typing import Any, ClassVar

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway.access.auth import Key
from gateway.api import endpoints
from gateway.api.endpoints import Shape
from gateway.api.protocol import answer, dump, envelope, error_headers, known_id, new_id, too_large
from gateway.errors import BadRequest, Busy, FitserveError, TooSlow
from gateway.routing.table import models_answer
from gateway.serve.proxy import head_cache, limits, multipart_form
from gateway.serve.proxy.data_plane import DataPlane
from gateway.serve.proxy.exchange import Exchange
from gateway.serve.proxy.heads import head_without_upgrade, request_lines

log = logging.getLogger(__name__)


class _Ahead:
    """Stands for an unfinished ASGI cycle, so that uvicorn queues the next one instead of starting it."""

    response_complete = False


def client_protocol(plane: DataPlane) -> type[ClientConnection]:
    """The protocol class for `uvicorn.Config(http=...)`: uvicorn makes one object per connection, all of which share `plane`."""
    return type("ClientConnection", (ClientConnection,), {"shared": plane, "__slots__": ()})


def _address(name: object) -> tuple[str, int] | None:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


class ClientConnection(HttpToolsProtocol):
    """One client's connection."""

    # Python keeps up to 30 attributes of an object in one block, and uvicorn has nearly as many. Slots keep these out of that block.
    __slots__ = (
        *("_deadline", "_discarding", "_exchange", "_ignores_upgrade", "_in_body", "_in_head", "_incoming", "_last_words"),
        *("_received", "_repeat", "_running", "_size", "_stall", "_turns", "_wire", "address", "plane"),
    )
    shared: ClassVar[DataPlane]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.plane = self.shared
        self._exchange: Exchange | None = None  # the request that has its turn
        self._incoming: Exchange | None = None  # the request that is being read; None: a request for FastAPI, or nothing
        self._running: RequestResponseCycle | None = None  # the ASGI cycle that has its turn
        self._repeat: head_cache.KnownRequestHead | None = None  # the head of the request before
        self._turns: deque[Exchange | tuple[RequestResponseCycle, Any]] = deque()
        self._last_words = b""  # a refusal, to be written after the answers that are due
        self._deadline = math.inf
        self._stall: limits.Stall | None = None
        self._in_head = self._in_body = False
        self._size = 0  # bytes so far of the head or body that comes in
        self._wire = 0  # bytes of the reads that the body comes in, with its chunks' heads and trailers
        self._received = 0  # bytes of this read, and of the reads before that the head came in
        self._discarding = False  # what still comes is discarded
        self._ignores_upgrade = False
        self.address = ""

    # --- the transport's side ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # As in uvicorn, which asks the kernel for the addresses that uvloop knows.
        self.connections.add(self)
        self.transport = transport
        self.flow = FlowControl(transport)
        self.scheme = "http"
        self.client, self.server = (_address(transport.get_extra_info(which)) for which in ("peername", "sockname"))
        self.address = self.client[0] if self.client else ""
        self.plane.opened(self, self.loop)
        self._deadline = self.loop.time() + limits.FIRST_BYTE_S
        if not self.plane.connection_limiter.admit(self.address):
            if self.plane.connection_limiter.flooded():
                transport.abort()
            else:
                self._hang_up(Busy("The gateway has too many connections.", hint="Try again in a second.", retry_after_s=1))

    def connection_lost(self, exc: Exception | None) -> None:
        self._let_go()
        for exchange in (self._exchange, self._incoming):
            if exchange is not None:
                exchange.leave()
        self._exchange = self._incoming = None
        self._turns.clear()
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def _let_go(self) -> None:
        self.plane.connection_limiter.left(self.address)
        self.plane.connections.discard(self)
        self._deadline = math.inf

    def data_received(self, data: bytes) -> None:
        waiting = not (self._in_head or self._in_body or self._discarding or self._busy())
        if waiting and self._repeats(data):
            return
        was_in_head = self._in_head
        self._received = len(data) + (self._received if was_in_head else 0)
        if self._discarding or not self._parse(data):
            return
        if self._in_head:
            if not was_in_head:
                self._size = 0
                self._deadline = self.loop.time() + limits.HEAD_S
            self._size += len(data) if was_in_head else 0
            if self._size > limits.HEAD_BYTES:
                self._hang_up(limits.head_too_large())
        elif self._in_body:
            self._deadline = self.loop.time() + limits.BODY_S
            self._wire += len(data)
            if self._wire > limits.most_on_the_wire(self._size):
                self._hang_up(limits.framing_too_large())
                self.flow.pause_reading()  # no honest client goes on like this
        elif waiting and self._exchange is not None:
            self._repeat = head_cache.remember(data, self._exchange, self.plane.keys.table)

    def _repeats(self, data: bytes) -> bool:
        """Whether `data` was a request with the head of the request before; that head need not be read again."""
        repeat = self._repeat
        if repeat is None or repeat.keys is not self.plane.keys.table:
            return False
        body = repeat.body(data)
        if body is None or len(body) > self.plane.limits.body_bytes:
            return False
        self._deadline = math.inf
        self._exchange = Exchange(
            self.plane, self, repeat.endpoint, repeat.found, repeat.key, new_id(), True, True, repeat.lines, body, whole=True
        )
        self._run(self._exchange)
        return True

    def _parse(self, data: bytes) -> bool:
        """Whether what comes next is still for this parser."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._ignores_upgrade:
                self._read_again(data[upgrade.args[0] :])
            return False
        except httptools.HttpParserError as error:
            log.debug("not HTTP: %r", error)
            if not self._discarding:  # the same bytes may have been refused already, for what came before the garbage
                hint = "Check the client, and what is between it and here."
                self._hang_up(BadRequest("What was sent is not an HTTP request.", hint=hint))
        return not self._discarding

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = limits.Stall(self.transport, self.loop.time())
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall = None
        if self._exchange is not None:
            self._exchange.resume()

    # --- the parser's side ---

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else a trailer, which nobody here reads
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._discarding:
            return
        self._in_head = False
        self._in_body = True
        self._size = self._wire = 0
        self._incoming = None
        method = self.parser.get_method()
        upgrade = self._get_upgrade() if self.parser.should_upgrade() and method != b"CONNECT" else None
        self._ignores_upgrade = upgrade is not None and upgrade != b"websocket"
        if self._ignores_upgrade:
            return
        endpoint = endpoints.USUAL.get((method, self.url))
        shape: Shape = endpoint.shape if endpoint is not None else "openai"
        id_ = None
        try:
            if upgrade is not None:
                raise BadRequest("There are no websockets here.", hint='Ask with "stream": true for events as they come.')
            if len(self._turns) >= limits.PIPELINED:
                raise BadRequest("Too many requests wait on this connection.", hint="Use more connections.")
            version = self.parser.get_http_version()
            found = limits.read_head(self.url, self.headers, version, self._received)
            id_ = known_id(found.get(b"x-request-id")) or new_id()
            if int(found.get(b"content-length", b"0")) > self.plane.limits.body_bytes:
                raise too_large(self.plane.limits.body_bytes)
            if endpoint is None:
                path, query = endpoints.split(self.url)
                if not endpoints.is_inference(path):
                    self._to_asgi(found)
                    return
                shape = endpoints.shape_of(path)
                key = self._admit(found, shape)
                endpoint = endpoints.find(path, query, method.decode())
            else:
                key = self._admit(found, shape)
        except FitserveError as error:
            self._hang_up(error, shape, id_)
            return
        keep = version == "1.1" and self.parser.should_keep_alive()
        exchange = Exchange(self.plane, self, endpoint, found, key, id_, keep, version != "1.0", request_lines(found))
        self._incoming = exchange
        if self._busy():
            self._turns.append(exchange)
        else:
            self._exchange = exchange
            if b"expect" in found and found[b"expect"].lower() == b"100-continue":
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _read_again(self, rest: bytes) -> None:
        """The request asked for a protocol that is not spoken here, as Java's HTTP client does (h2c). It is read as if it had not;
        the parser has left the body alone."""
        head = head_without_upgrade(self.parser.get_method(), self.url, self.parser.get_http_version(), self.headers)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(head + rest)

    def _admit(self, found: dict[bytes, bytes], shape: Shape) -> Key:
        if shape == "anthropic" and b"x-api-key" in found and b"authorization" not in found:
            found[b"authorization"] = b"Bearer " + found[b"x-api-key"]
        return self.plane.keys.who(found, "inference", self.address)

    def _to_asgi(self, found: dict[bytes, bytes]) -> None:
        """The request is FastAPI's."""
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url, self.headers = url, headers
        self.scope["headers"] = headers
        self.expect_100_continue = found.get(b"expect", b"").lower() == b"100-continue"
        if not self._busy():
            super().on_headers_complete()
            self._running = self.cycle
        else:
            self.cycle = _Ahead()  # type: ignore[assignment]
            super().on_headers_complete()
            self.flow.resume_reading()
            self._turns.append(self.pipeline.pop())

    def on_body(self, data: bytes) -> None:
        if self._discarding:
            return
        self._size += len(data)
        incoming = self._incoming
        if self._size > self.plane.limits.body_bytes:
            error = too_large(self.plane.limits.body_bytes)
            self._hang_up(error) if incoming is None else self._hang_up(error, incoming.endpoint.shape, incoming.id)
        elif incoming is None:
            super().on_body(data)
        else:
            incoming.more(data)
            if incoming.state == "reading" and self._size > multipart_form.PREFIX_BYTES:
                self._read_on(incoming)

    def on_message_complete(self) -> None:
        if self._discarding or self._ignores_upgrade:
            return
        self._in_body = False
        self._deadline = math.inf
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            self.flow.resume_reading()  # it may have been paused for what was already here
            incoming.complete()
            if incoming is self._exchange and incoming.state == "reading":
                self._run(incoming)
            return
        super().on_message_complete()
        if not self._busy():
            self._next()  # FastAPI had answered before the body was complete

    def _read_on(self, exchange: Exchange) -> None:
        """More of the body is to come: the request goes on as soon as it can, and large ones share what body_budget there is."""
        try:
            if exchange is self._exchange and exchange.may_start():
                self._run(exchange)
                if exchange.state in ("connecting", "queued"):
                    self.pause_upload()
                return
        except FitserveError as error:
            self._hang_up(error, exchange.endpoint.shape, exchange.id)
            return
        if len(exchange.body) > limits.SMALL_BYTES:
            size = int(exchange.found.get(b"content-length", b"%d" % self.plane.limits.body_bytes))
            exchange.large = True
            if not self.plane.body_budget.ask(exchange, size, self.resume_upload):
                self.pause_upload()

    def pause_upload(self) -> None:
        """The engine takes the body slowly: the client is read as slowly."""
        if self._in_body:
            self.flow.pause_reading()
            self._deadline = math.inf

    def resume_upload(self) -> None:
        if self._in_body and self.flow.read_paused:
            self.flow.resume_reading()
            self._deadline = self.loop.time() + limits.BODY_S

    def uploaded(self, exchange: Exchange, left: int) -> None:
        """What was here of the body is written to the engine, but for `left` bytes."""
        if left == 0:
            if exchange.large:
                self.plane.body_budget.leave(exchange)
            self.resume_upload()

    # --- answers, in turn ---

    def _busy(self) -> bool:
        return self._exchange is not None or self._running is not None or bool(self._turns)

    def _run(self, exchange: Exchange) -> None:
        """It is the turn of `exchange`, and its body is complete."""
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
        self.transport.write(self._refusal(error, exchange.endpoint.shape, exchange.id, keep=exchange.keep))
        self.answered(exchange)

    def answered(self, exchange: Exchange) -> None:
        """The answer to `exchange` is written, or broken off."""
        self.server_state.total_requests += 1
        self._exchange = None
        if exchange.keep and exchange.whole:
            self._next()
        else:
            self._close(discard=not exchange.whole)

    def on_response_complete(self) -> None:
        """FastAPI has answered."""
        self.server_state.total_requests += 1
        self._running = None
        self.flow.resume_reading()
        if not self.transport.is_closing():
            self._next()

    def _next(self) -> None:
        """Whose turn is it?"""
        if not self._turns:
            if self._last_words:
                self.transport.write(self._last_words)
                self._close(discard=True)
            elif not self._in_head and not self._in_body:
                self._deadline = self.loop.time() + self.plane.limits.keep_alive_s
            return
        turn = self._turns.popleft()
        if isinstance(turn, Exchange):
            self._exchange = turn
            if turn.whole:
                self.loop.call_soon(self._run, turn)
        else:
            self._running = turn[0]
            self._start_asgi_task(*turn)

    def _hang_up(self, error: FitserveError, shape: Shape = "openai", id_: str | None = None) -> None:
        """Refuses the request that comes in, once those before it are answered. Nothing more is read."""
        self._discarding = True
        id_ = id_ or new_id()
        self.plane.meter.turned_away(error, id_, self.address)
        refusal = self._refusal(error, shape, id_, keep=False)
        if self.parser is not None and self.parser.get_method() == b"HEAD":
            # The length is told and the body is not sent.
            refusal = refusal[: refusal.find(b"\r\n\r\n") + 4]
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            started = incoming.status
            incoming.leave()
            if incoming is self._exchange:
                self._exchange = None
                if started:
                    self._cut()
                    return
            else:
                self._turns.remove(incoming)
        elif self._in_body and self._running is not None and self._running is self.cycle:
            self._running.disconnected = True
            self._running.message_event.set()
            if self._running.response_started:
                self._cut()
                return
            self._running = None
        if self._busy():
            self._last_words = refusal
        elif not self.transport.is_closing():
            self.transport.write(refusal)
            self._close(discard=True)

    def _refusal(self, error: FitserveError, shape: Shape, id_: str, *, keep: bool) -> bytes:
        body = dump(envelope(error, shape))
        return answer(error.status, body, id_, [*self._headers(keep=keep), *error_headers(error)])

    def _headers(self, *, keep: bool) -> list[tuple[bytes, bytes]]:
        return self.server_state.default_headers if keep else [*self.server_state.default_headers, (b"connection", b"close")]

    def _close(self, *, discard: bool) -> None:
        """Ends the connection after what is written. `discard`: the client may still be sending; closed at once, the kernel
        would throw the answer away."""
        if discard and not self.transport.is_closing():
            self._discarding = True
            self.flow.resume_reading()
            self.transport.write_eof()
            self._deadline = self.loop.time() + limits.LINGER_S
        else:
            self.transport.close()

    def _cut(self) -> None:
        """Closes at once. The engine is let go of now, not when the loop says that the connection is lost: until then it could
        write to what is closed."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.leave()
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
        elif (self._stall is not None and self._stall.over(now)) or (self.flow.read_paused and limits.has_left(self.transport)):
            self._cut()
        if self._exchange is not None:
            self._exchange.sweep(now)

    def shutdown(self) -> None:
        """The server stops: the answer that has its turn is finished, nothing new begins."""
        self._turns.clear()
        if self._exchange is not None:
            self._exchange.keep = False
        elif self._running is not None:
            self._running.keep_alive = False
        else:
            self.transport.close()

    def stop(self) -> None:
        """The time to finish is over."""
        if self._exchange is not None:
            self._exchange.stop()
