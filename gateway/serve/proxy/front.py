"""What comes in on a client's connection: as in uvicorn, except that inference requests never become ASGI, but an `Exchange`.

phase       what comes next                                      too long (gateway.serve.guard)
new         the first byte                                       closed
head        the rest of a request's head                         408, closed
body        the next piece of its body                           408, closed
answering   the end of the answer; the client may send on        closed when it takes nothing
idle        the next request                                     closed
lingering   nothing: what still comes is discarded               closed
"""

from __future__ import annotations

import asyncio
import logging
import math

import httptools
from uvicorn.protocols.http.flow_control import FlowControl

from gateway.access.auth import Key
from gateway.api import endpoints as surface
from gateway.api.endpoints import Shape
from gateway.api.protocol import known_id, new_id, too_large
from gateway.errors import BadRequest, Busy, FitserveError
from gateway.serve.proxy import form
from gateway.serve.proxy import head_cache as repeats
from gateway.serve.proxy import limits as guard
from gateway.serve.proxy.exchange import Exchange
from gateway.serve.proxy.heads import request_lines
from gateway.serve.proxy.line import Line
from gateway.serve.proxy.plane import Plane

log = logging.getLogger(__name__)


class _Ahead:
    """Stands for an unfinished ASGI cycle, so that uvicorn queues the next one instead of starting it."""

    response_complete = False


def front(plane: Plane) -> type[Front]:
    """The protocol class for `uvicorn.Config(http=...)`: uvicorn makes one object per connection, all of which share `plane`."""
    return type("Front", (Front,), {"shared": plane, "__slots__": ()})


def _address(name: object) -> tuple[str, int] | None:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


class Front(Line):
    """One client's connection, as far as requests go."""

    __slots__ = ()

    # --- the transport's side ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # As in uvicorn, which asks the kernel for the addresses that uvloop knows.
        self.connections.add(self)
        self.transport = transport
        self.flow = FlowControl(transport)
        self.scheme = "http"
        self.client, self.server = (_address(transport.get_extra_info(which)) for which in ("peername", "sockname"))
        self._address = self.client[0] if self.client else ""
        self.plane.opened(self, self.loop)
        self._deadline = self.loop.time() + guard.FIRST_BYTE_S
        if not self.plane.doorman.admit(self._address):
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
        self.plane.doorman.left(self._address)
        self.plane.fronts.discard(self)
        self._deadline = math.inf

    def data_received(self, data: bytes) -> None:
        waiting = not (self._in_head or self._in_body or self._deaf or self._busy())
        if waiting and self._repeats(data):
            return
        was_in_head = self._in_head
        self._received = len(data) + (self._received if was_in_head else 0)
        if self._deaf or not self._parse(data):
            return
        if self._in_head:
            if not was_in_head:
                self._size = 0
                self._deadline = self.loop.time() + guard.HEAD_S
            self._size += len(data) if was_in_head else 0
            if self._size > guard.HEAD_BYTES:
                self._hang_up(guard.head_too_large())
        elif self._in_body:
            self._deadline = self.loop.time() + guard.BODY_S
        elif waiting and self._exchange is not None:
            self._repeat = repeats.remember(data, self._exchange, self.plane.keys.table)

    def _repeats(self, data: bytes) -> bool:
        """Whether that was a request with the head of the one before, which need not be read again."""
        repeat = self._repeat
        if repeat is None or repeat.keys is not self.plane.keys.table:
            return False
        body = repeat.body(data)
        if body is None or len(body) > self.plane.limits.body_bytes:
            return False
        self._deadline = math.inf
        self._exchange = Exchange(
            self, repeat.endpoint, repeat.found, repeat.key, new_id(), True, True, repeat.lines, body, whole=True
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
            elif not self._deaf:
                self._let_go()
                self.handle_websocket_upgrade()
            return False
        except httptools.HttpParserError as error:
            log.debug("not HTTP: %r", error)
            if not self._deaf:  # the same bytes may have been refused already, for what came before the garbage
                hint = "Check the client, and what is between it and here."
                self._hang_up(BadRequest("What was sent is not an HTTP request.", hint=hint))
        return not self._deaf

    # --- the parser's side ---

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._deaf:
            return
        self._in_head = False
        self._in_body = True
        self._size = 0
        self._incoming = None
        method = self.parser.get_method()
        upgrade = self.parser.should_upgrade() and method != b"CONNECT"
        self._ignores_upgrade = upgrade and not self._should_upgrade()
        if self._ignores_upgrade:
            return
        endpoint = surface.USUAL.get((method, self.url))
        shape: Shape = endpoint.shape if endpoint is not None else "openai"
        id_ = None
        try:
            if len(self._turns) >= guard.PIPELINED:
                raise BadRequest("Too many requests wait on this connection.", hint="Use more connections.")
            version = self.parser.get_http_version()
            found = guard.read_head(self.url, self.headers, version, self._received)
            id_ = known_id(found.get(b"x-request-id")) or new_id()
            if int(found.get(b"content-length", b"0")) > self.plane.limits.body_bytes:
                raise too_large(self.plane.limits.body_bytes)
            if endpoint is None or upgrade:
                path, query = surface.split(self.url)
                if upgrade or not surface.is_inference(path):
                    self._to_asgi(found, upgrade=upgrade)
                    return
                shape = surface.shape_of(path)
                key = self._admit(found, shape)
                endpoint = surface.find(path, query, method.decode())
            else:
                key = self._admit(found, shape)
        except FitserveError as error:
            self._hang_up(error, shape, id_)
            return
        keep = version == "1.1" and self.parser.should_keep_alive()
        exchange = Exchange(self, endpoint, found, key, id_, keep, version != "1.0", request_lines(found))
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
        head = [b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                head.append(b"connection: close\r\n" if b"close" in value.lower() else b"")
            elif name != b"upgrade":
                head.append(b"%b: %b\r\n" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(b"".join((*head, b"\r\n", rest)))

    def _admit(self, found: dict[bytes, bytes], shape: Shape) -> Key:
        if shape == "anthropic" and b"x-api-key" in found and b"authorization" not in found:
            found[b"authorization"] = b"Bearer " + found[b"x-api-key"]
        return self.plane.keys.who(found, "inference", self._address)

    def _to_asgi(self, found: dict[bytes, bytes], *, upgrade: bool) -> None:
        """The request is FastAPI's, or a websocket to be refused there."""
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url, self.headers = url, headers
        self.scope["headers"] = headers
        self.expect_100_continue = found.get(b"expect", b"").lower() == b"100-continue"
        if upgrade:
            if self._busy():
                raise BadRequest("A websocket cannot follow a request.", hint="Open a connection for it.")
            super().on_headers_complete()
        elif not self._busy():
            super().on_headers_complete()
            self._running = self.cycle
        else:
            self.cycle = _Ahead()  # type: ignore[assignment]
            super().on_headers_complete()
            self.flow.resume_reading()
            self._turns.append(self.pipeline.pop())

    def on_body(self, data: bytes) -> None:
        if self._deaf:
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
            if incoming.state == "reading" and self._size > form.PREFIX_BYTES:
                self._read_on(incoming)

    def on_message_complete(self) -> None:
        if self._deaf or self._ignores_upgrade:
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
        """More of the body is to come: the request goes on as soon as it can, and large ones share what room there is."""
        try:
            if exchange is self._exchange and exchange.may_start():
                self._run(exchange)
                if exchange.state in ("connecting", "queued"):
                    self.pause_upload()
                return
        except FitserveError as error:
            self._hang_up(error, exchange.endpoint.shape, exchange.id)
            return
        if len(exchange.body) > guard.SMALL_BYTES:
            size = int(exchange.found.get(b"content-length", b"%d" % self.plane.limits.body_bytes))
            exchange.large = True
            if not self.plane.room.ask(exchange, size, self.resume_upload):
                self.pause_upload()

    def pause_upload(self) -> None:
        """The engine takes the body slowly: the client is read as slowly."""
        if self._in_body:
            self.flow.pause_reading()
            self._deadline = math.inf

    def resume_upload(self) -> None:
        if self._in_body and self.flow.read_paused:
            self.flow.resume_reading()
            self._deadline = self.loop.time() + guard.BODY_S

    def uploaded(self, exchange: Exchange, left: int) -> None:
        """What was here of the body is written to the engine, but for `left` bytes."""
        if left == 0:
            if exchange.large:
                self.plane.room.leave(exchange)
            self.resume_upload()
