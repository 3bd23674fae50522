"""Connections of this process to the data plane: in this process, or in its workers in turn."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

from gateway.proxy.inner_connection import open_inner

if TYPE_CHECKING:
    from gateway.proxy.workers.supervisor import Workers
    from gateway.server.batches.line_client import Streams
    from gateway.server.gateway_app import GatewayApp


class OwnConnections:
    """Opens connections.

    workers: the processes with a data plane; None: this process has one.
    """

    def __init__(self, app: GatewayApp, workers: Workers | None) -> None:
        self._app = app
        self._workers = workers
        self._turns = itertools.count()

    async def open(self) -> Streams:
        """A new connection. Raises OSError."""
        if self._workers is not None:
            paths = self._workers.inner_paths
            return await asyncio.open_unix_connection(paths[next(self._turns) % len(paths)])
        protocol = self._app.inner_protocol
        if protocol is None:
            raise ConnectionRefusedError("the gateway does not take requests yet")
        reader, writer, _ = await open_inner(protocol)
        return reader, writer
