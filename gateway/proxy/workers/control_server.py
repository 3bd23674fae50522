"""The server of the control process: the application without its data plane, called only by
workers."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from gateway.garbage import exempt_start_objects
from gateway.proxy.uvicorn_config import uvicorn_config
from gateway.proxy.workers.control_forwarder import ForwardedAddress
from gateway.proxy.workers.sockets import forget
from gateway.proxy.workers.supervisor import Workers
from gateway.settings import Settings


class ControlServer(uvicorn.Server):
    """When this server stops, the workers stop too: they finish their answers, and this server
    their forwarded requests."""

    def __init__(
        self, settings: Settings, app: ASGIApp, workers: Workers, stopping: Callable[[], object]
    ) -> None:
        """`stopping`: ends streams that would never end."""
        super().__init__(
            uvicorn_config(
                ForwardedAddress(app), "httptools", lifespan="on", grace_s=settings.stop_grace_s
            )
        )
        self._workers = workers
        self._stopping = stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        exempt_start_objects()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping()
        self._workers.drain()
        await super().shutdown(sockets)
        # After a handover the path belongs to the socket of the other gateway.
        if not self._workers.was_handed_over:
            forget(self._workers.control)
