"""What goes out on a client's connection: answers in turn, and the end of the connection. `Front` is what comes in.

Requests of one connection are answered one after the other, in order. `_exchange` or `_running` (an ASGI cycle of uvicorn's) is the
one whose turn it is; those that came early wait in `_turns`. A request that cannot be read ends the connection: its refusal is said
once those before it are answered (`_last_words`), and what the client still sends is discarded for a moment, since closed at once
the kernel would throw the answer away with it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from typing import Any, ClassVar

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway.api.endpoints import Shape
from gateway.api.protocol import answer, dump, envelope, error_headers, new_id
from gateway.errors import FitserveError, TooSlow
from gateway.serve.proxy import limits as guard
from gateway.serve.proxy.answer import Answer
from gateway.serve.proxy.exchange import Exchange
from gateway.serve.proxy.head_cache import Repeat
from gateway.serve.proxy.models import models
from gateway.serve.proxy.plane import Plane

log = logging.getLogger(__name__)


class Line(HttpToolsProtocol):
    """One client's connection, as far as answers go."""

    # Python keeps 30 attributes of an object together and close to it, which uvicorn's are; these beside them are not to be more.
    __slots__ = (
        *("_address", "_deadline", "_deaf", "_exchange", "_ignores_upgrade", "_in_body", "_in_head", "_incoming"),
        *("_last_words", "_received", "_repeat", "_running", "_size", "_stall", "_turns", "plane"),
    )
    shared: ClassVar[Plane]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.plane = self.shared
        self._exchange: Exchange | None = None  # the one whose turn it is
        self._incoming: Exchange | None = None  # the one that is being read; None: ASGI, or none
        self._running: RequestResponseCycle | None = None  # the ASGI cycle whose turn it is
        self._repeat: Repeat | None = None  # the head of the one before
        self._turns: deque[Exchange | tuple[RequestResponseCycle, Any]] = deque()
        self._last_words = b""  # to be said after the answers that are due
        self._deadline = math.inf
        self._stall: guard.Stall | None = None
        self._in_head = self._in_body = False
        self._size = 0  # bytes so far of the head or body that comes in
        self._received = 0  # bytes of this read, and of those before it that the head came in
        self._deaf = False  # what still comes is discarded
        self._ignores_upgrade = False
        self._address = ""

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = guard.Stall(self.transport, self.loop.time())
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall = None
        if self._exchange is not None:
            self._exchange.resume()

    def _busy(self) -> bool:
        return self._exchange is not None or self._running is not None or bool(self._turns)

    def _run(self, exchange: Exchange) -> None:
        """It is the turn of `exchange`, and its body is complete."""
        if self.transport.is_closing():
            return  # the client was found gone when the answer before was written; `connection_lost` comes next
        try:
            if exchange.endpoint.at == "models":
                body = dump(models(self.plane.routes.table, exchange.endpoint.id, exchange.key))
                self.transport.write(answer(200, body, exchange.id, self._headers(keep=exchange.keep)))
                self.answered(exchange)
            else:
                exchange.start()
        except FitserveError as error:
            self.refuse(exchange, error)
        except Exception:
            log.exception("%s: a bug in the data plane", exchange.id)
            self.refuse(exchange, FitserveError("The gateway failed at this request.", hint="Its log says why."))

    def refuse(self, exchange: Answer, error: FitserveError) -> None:
        """Answers with an error of the gateway's own. Only for an exchange whose answer has not started."""
        self.plane.meter.refused(exchange, error)
        self.transport.write(self._words(error, exchange.endpoint.shape, exchange.id, keep=exchange.keep))
        self.answered(exchange)

    def answered(self, exchange: Answer) -> None:
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
        self._deaf = True
        id_ = id_ or new_id()
        self.plane.meter.turned_away(error, id_, self._address)
        words = self._words(error, shape, id_, keep=False)
        if self.parser is not None and self.parser.get_method() == b"HEAD":
            # The length is told and the body is not sent.
            words = words[: words.find(b"\r\n\r\n") + 4]
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
            self._last_words = words
        elif not self.transport.is_closing():
            self.transport.write(words)
            self._close(discard=True)

    def _words(self, error: FitserveError, shape: Shape, id_: str, *, keep: bool) -> bytes:
        body = dump(envelope(error, shape))
        return answer(error.status, body, id_, [*self._headers(keep=keep), *error_headers(error)])

    def _headers(self, *, keep: bool) -> list[tuple[bytes, bytes]]:
        return self.server_state.default_headers if keep else [*self.server_state.default_headers, (b"connection", b"close")]

    def _close(self, *, discard: bool) -> None:
        """Ends the connection after what is written. `discard`: the client may still be sending; closed at once, the kernel
        would throw the answer away."""
        if discard and not self.transport.is_closing():
            self._deaf = True
            self.flow.resume_reading()
            self.transport.write_eof()
            self._deadline = self.loop.time() + guard.LINGER_S
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
            if self._deaf:
                self._cut()
            elif self._in_head or self._in_body:
                self._hang_up(TooSlow("The request did not come in within its time.", hint="Send it without pauses."))
            else:
                self.transport.close()
        elif (self._stall is not None and self._stall.over(now)) or (self.flow.read_paused and guard.has_left(self.transport)):
            self._cut()
        if self._exchange is not None:
            self._exchange.sweep(now)

    def shutdown(self) -> None:
        """The server stops: what is being answered is finished, nothing new begins."""
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
