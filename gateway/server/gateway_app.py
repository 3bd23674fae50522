"""The ASGI application around FastAPI, which authenticates requests, and the state shared with the
server."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import FitserveError, NotReady
from gateway.keys import Scope as KeyScope
from gateway.logging import Logger
from gateway.proxy.access.answer_rate import AnswerRate
from gateway.proxy.access.auth import Key
from gateway.proxy.access.budgets import TokenCount
from gateway.proxy.access.origins import EXPOSED_HEADERS, METHODS
from gateway.proxy.access.scopes import Scopes
from gateway.proxy.api.endpoints import is_inference, is_of_batches
from gateway.proxy.api.protocol import request_id, send_error
from gateway.proxy.metrics.access_log import AdminRequest
from gateway.proxy.tls import Certificate
from gateway.server.handover import Takeover
from gateway.server.open_answers import OpenAnswer, OpenAnswers

if TYPE_CHECKING:
    from gateway.proxy.client_connection import ClientConnection
    from gateway.server.gateway_parts import ServingParts

log = Logger("fitserve")


class GatewayApp:
    """ASGI around FastAPI: checks the key before anything reads the request. Inference never comes
    here, see `ClientConnection`.

    Authorisation uses `scope["path"]`, the value that routing uses too, so no spelling of a URL
    bypasses it.
    """

    def __init__(
        self,
        api: FastAPI,
        front: ServingParts,
        scopes: Scopes,
        certificate: Certificate | None = None,
    ) -> None:
        plane = front.plane
        # Preflights of browsers have no key, so they are answered before the check of keys.
        self._handle: ASGIApp = self._authenticate
        if plane.origins is not None:
            self._handle = CORSMiddleware(
                self._authenticate,
                allow_origins=tuple(plane.origins.named_origins),
                allow_methods=METHODS,
                allow_headers=("*",),
                expose_headers=EXPOSED_HEADERS,
            )
        self.api = api
        self.plane = plane
        self.workers = front.workers
        self.scopes = scopes
        self.failure: str | None = None  # cause of an unexpected end of the loop
        self.stop: Callable[[], object] | None = None  # ends the server
        self.has_started: Callable[[], bool] = lambda: True
        """Returns whether the server accepts connections."""
        self.lock: int | None = None  # lock of the data folder, which another gateway may take over
        self.client_sockets: list[socket.socket] = []  # listening sockets for clients
        self.takeover: Takeover | None = None  # offer of the gateway that this one replaces
        self.drain: Callable[[], Awaitable[None]] | None = (
            None  # finishes all requests, and ends the server
        )
        self.certificate = certificate
        self.is_replaced = False  # another gateway runs the control loop
        self.answers = OpenAnswers()
        self.inner_protocol: Callable[[], ClientConnection] | None = None
        """Makes connections of the gateway to its own data plane, where this process has one."""
        self.on_keys: Callable[[], object] = lambda: None
        """Called after each change of the valid keys."""
        self.on_stop: tuple[Callable[[], object], ...] = ()  # end endless streams
        self._keys = front.keys
        self._identities = front.identities
        self._access_log = front.settings.access_log
        self._rate = AnswerRate()

    def close_streams(self) -> None:
        """End endless streams, because the server stops."""
        for end in self.on_stop:
            end()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.api(scope, receive, send)
        elif (
            scope["type"] == "http"
            and self._access_log
            and self.scopes.required_scope(scope) != "open"
        ):
            request = AdminRequest(scope, send, self.scopes)
            try:
                await self._handle(scope, receive, request.send)
            finally:
                request.log()
        else:
            await self._handle(scope, receive, send)

    def handle_loop_end(self, loop_task: asyncio.Task[None]) -> None:
        """End the gateway after its loop has ended: no engine is watched any more, and the
        supervisor of this process should restart it."""
        error = None if loop_task.cancelled() else loop_task.exception()
        self.failure = "it was cancelled" if loop_task.cancelled() else "it returned"
        if error:
            self.failure = f"{type(error).__name__}: {error}"
        log.critical(
            "the control loop has ended, so the gateway ends; engines keep running",
            reason=self.failure,
            exc_info=error,
        )
        if self.stop is not None:
            self.stop()

    def fail(self, reason: str) -> None:
        """End the gateway, because no process has the control loop."""
        self.failure = reason
        log.critical(
            "no process has the control loop, so the gateway ends; engines keep running",
            reason=reason,
        )
        if self.stop is not None:
            self.stop()

    async def _authenticate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request with the required scope pass, and answer others with the error."""
        try:
            need = "inference" if is_inference(scope["path"]) else self.scopes.required_scope(scope)
            peer = scope["client"][0] if scope.get("client") else ""
            address = self.plane.proxies.client_address(scope["headers"], peer)
            scope["address"] = address
            is_kept_here = need != "inference" or is_of_batches(scope["path"])
            if need != "open" and self.is_replaced and is_kept_here:
                raise NotReady(
                    "This gateway is being replaced by another gateway.",
                    hint="Try again in a second.",
                    retry_after_s=1,
                )
            if need != "open":
                key = await self._caller(scope, need, peer, address)
                scope["key"] = key.name
                scope["caller"] = key
                is_admin = "admin" in key.scopes
                wait_s = 0.0 if is_admin else self._rate.wait_s(key.name, address)
                permit = self.plane.limiter.admit(key, "openai", time.monotonic())
                answer = self._open_answer(key, need, scope, receive, send)
            else:
                permit = answer = None
                wait_s = self._rate.wait_s("", address)
        except FitserveError as error:
            await send_error(send, error, request_id(scope))
            return
        try:
            if answer is not None:
                self.answers.add(answer)
                receive = answer.receive
                send = answer.send
            if wait_s:
                await asyncio.sleep(wait_s)
            await self.api(scope, receive, send)
        finally:
            if answer is not None:
                await self.answers.remove(answer)
            if permit is not None:
                permit.finish(TokenCount(), time.monotonic())

    async def _caller(self, scope: Scope, need: KeyScope, peer: str, address: str) -> Key:
        """The caller of a request, by identity or key. Raises Forbidden, and the errors of
        `Keys.admit` and `Identities.caller`.

        peer: the address of the connection.
        address: that of the client.
        """
        if self._identities is not None:
            key = await self._identities.caller(scope["headers"], need, peer, address)
            if key is not None:
                return key
        return self._keys.admit(scope["headers"], need, address)

    def _open_answer(
        self, key: Key, need: KeyScope, scope: Scope, receive: Receive, send: Send
    ) -> OpenAnswer | None:
        """The answer to a request that changes nothing, which ends with its key. None for a change,
        which is completed even if its key is removed."""
        if scope["method"] != "GET":
            return None
        if self._identities is not None and key.digest not in self._keys.table.keys:
            # A person, whom each request names and no table.
            return OpenAnswer(lambda: not key.has_ended(), receive, send, key.ends_at)
        return OpenAnswer(lambda: self._keys.allows(key, need), receive, send, key.ends_at)
