"""A relay between a host and the socket of a real Docker Engine, with faults on request.

async with Wire(path) as wire: DockerHost(..., base_url=wire.url)
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from gateway.hosts.docker.client import socket_path

REQUEST = re.compile(rb"(GET|POST|PUT|DELETE|HEAD) /")


class Wire:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"unix://{path}"
        self.answered_bytes = 0
        """The bytes of Docker's answers that the host has read."""
        self.open: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._requests_left: int | None = None
        self.held_back_event = asyncio.Event()
        """Something came while nothing passed."""

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._server.close()
        self.cut_connections()
        while self.open:
            await asyncio.wait(self.open)
        await self._server.wait_closed()

    def hang(self) -> None:
        """From now on no byte passes, and no connection breaks."""
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    def cut_connections(self) -> None:
        """Break every connection that is open now."""
        for task in self.open:
            task.cancel()

    def break_after(self, requests: int) -> None:
        """Pass on so many requests, the last without its answer; then break everything, for
        good."""
        self._requests_left = requests

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.open.add(task)
        # Not at the end of this: a task that is cancelled while it ends would stay here.
        task.add_done_callback(self.open.discard)
        ways: list[asyncio.Task[None]] = []
        writers = [writer]
        with suppress(OSError, asyncio.CancelledError):
            if self._requests_left != 0:
                docker_reader, docker_writer = await asyncio.open_unix_connection(socket_path())
                writers.append(docker_writer)
                ways += [
                    asyncio.create_task(self._send_upstream(reader, docker_writer)),
                    asyncio.create_task(self._down(docker_reader, writer)),
                ]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        try:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in writers:
                # Relayed bytes arrive before the end of the connection.
                end.close()
                with suppress(OSError):
                    await end.wait_closed()
        finally:
            for end in writers:
                end.transport.abort()

    async def _send_upstream(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(65536):
            if not self._flowing.is_set():
                self.held_back_event.set()
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
            if self._requests_left is not None and REQUEST.match(data):
                self._requests_left -= 1
                if self._requests_left == 0:
                    self.cut_connections()

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._flowing.wait()
            if self._requests_left == 0:
                return
            writer.write(data)
            await writer.drain()
            self.answered_bytes += len(data)
