"""The server of the control process: the application without its data plane, asked by the workers alone."""

from __future__ import annotations

import socket

import uvicorn
from starlette.types import ASGIApp

from gateway.serve.workers.control_forwarder import ForwardedAddress
from gateway.serve.workers.sockets import forget
from gateway.serve.workers.supervisor import Workers
from gateway.settings import Settings


class ControlServer(uvicorn.Server):
    """When it stops, the workers stop: they finish what they are answering, and it what they have passed to it."""

    def __init__(self, settings: Settings, app: ASGIApp, workers: Workers) -> None:
        super().__init__(
            uvicorn.Config(
                ForwardedAddress(app),
                http="httptools",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=round(settings.stop_grace_s),
            )
        )
        self._workers = workers

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._workers.drain()
        await super().shutdown(sockets)
        forget(self._workers.control)
