"""Who may come in: the key is checked before anything reads the request. And what the server and
the gateway's parts tell each other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import FitserveError, NotReady
from gateway.logging import Logger
from gateway.proxy.access.auth import Keys
from gateway.proxy.access.origins import EXPOSED, METHODS
from gateway.proxy.access.scopes import Scopes
from gateway.proxy.api.endpoints import is_inference
from gateway.proxy.api.protocol import request_id, send_error
from gateway.proxy.data_plane import DataPlane
from gateway.proxy.metrics.access_log import AdminRequest
from gateway.server.handover import Taken
from gateway.tls import Certificate

if TYPE_CHECKING:
    from gateway.proxy.workers.supervisor import Workers

log = Logger("fitserve")


class GatewayApp:
    """Pure ASGI around FastAPI: checks the key before anything reads the request. Inference never
    comes here, see `ClientConnection`.

    Authorisation looks at `scope["path"]`, the same value that routing uses, so no spelling of a
    URL tells them apart.
    """

    def __init__(
        self,
        inner: ASGIApp,
        keys: Keys,
        scopes: Scopes,
        plane: DataPlane,
        workers: Workers | None = None,
        *,
        access_log: bool = False,
    ) -> None:
        """Preflights of browsers are answered before any key is looked for: they have none."""
        self._answer: ASGIApp = self._let_in
        if plane.origins is not None:
            self._answer = CORSMiddleware(
                self._let_in,
                allow_origins=tuple(plane.origins.named),
                allow_methods=METHODS,
                allow_headers=("*",),
                expose_headers=EXPOSED,
            )
        self.plane = plane
        self.workers = workers
        self.scopes = scopes
        self.failure: str | None = None  # why the loop has ended, though nobody ended it
        self.stop: Callable[[], object] | None = None  # ends the server
        self.started: Callable[[], bool] = lambda: True  # whether the server takes connections
        self.lock: int | None = None  # of the data folder, which another gateway may take over
        self.giving_sockets: list[socket.socket] = []  # those at which clients come in
        self.taken: Taken | None = None  # from the gateway that this one takes over from
        self.leave: Callable[[], Awaitable[None]] | None = (
            None  # finishes what clients wait for, and ends the server
        )
        self.certificate: Certificate | None = None
        self.replaced = False  # another gateway has the loop
        self.on_stop: tuple[Callable[[], object], ...] = ()  # end streams that would never end
        self._inner = inner
        self._keys = keys
        self._access_log = access_log

    def stopping(self) -> None:
        """The server begins to stop."""
        for end in self.on_stop:
            end()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._inner(scope, receive, send)
        elif scope["type"] == "http" and self._access_log and self.scopes.needed(scope) != "open":
            visit = AdminRequest(scope, send, self.scopes)
            try:
                await self._answer(scope, receive, visit.send)
            finally:
                visit.tell()
        else:
            await self._answer(scope, receive, send)

    def loop_ended(self, running: asyncio.Task[None]) -> None:
        """Without the loop no engine is watched: whoever supervises this process has to hear of it,
        and start another one."""
        error = None if running.cancelled() else running.exception()
        self.failure = (
            f"{type(error).__name__}: {error}"
            if error
            else "it was cancelled"
            if running.cancelled()
            else "it returned"
        )
        log.critical(
            "the control loop has ended, and so does the gateway; engines go on",
            reason=self.failure,
            exc_info=error,
        )
        if self.stop is not None:
            self.stop()

    def fail(self, reason: str) -> None:
        """As where the loop has ended."""
        self.failure = reason
        log.critical(
            "nobody has the control loop, so the gateway ends; engines go on", reason=reason
        )
        if self.stop is not None:
            self.stop()

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            need = "inference" if is_inference(scope["path"]) else self.scopes.needed(scope)
            if need != "open" and self.replaced and need != "inference":
                raise NotReady(
                    "This gateway is being replaced by another one.",
                    hint="Try again in a second.",
                    retry_after_s=1,
                )
            if need != "open":
                key = self._keys.admit(
                    scope["headers"], need, scope["client"][0] if scope.get("client") else ""
                )
                scope["key"] = key.name
        except FitserveError as error:
            await send_error(send, error, request_id(scope))
            return
        await self._inner(scope, receive, send)
