"""A scripted engine on a real socket: records raw requests, and which connections were closed from
the other side.

async def script(call: Call) -> None: ...          run once per request
async with Upstream(script) as upstream: upstream.url
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress


class Call:
    """One connection. `requests` are raw bytes, head and body; `closed`: closed by the peer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.requests: list[bytes] = []
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.closed = asyncio.Event()
        self.sent = 0
        self.dead = False

    @property
    def head(self) -> list[bytes]:
        """Lines of the last request's head."""
        return self.requests[-1].partition(b"\r\n\r\n")[0].split(b"\r\n")

    @property
    def headers(self) -> dict[str, str]:
        pairs = (line.decode("latin-1").partition(":") for line in self.head[1:])
        return {name.lower(): value.strip() for name, _, value in pairs}

    @property
    def body(self) -> bytes:
        return self.requests[-1].partition(b"\r\n\r\n")[2]

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()
        self.sent += len(data)

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def start(
        self, content_type: str = "text/event-stream; charset=utf-8", status: str = "200 OK"
    ) -> None:
        """Response head of a chunked answer."""
        await self.send(
            f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ntransfer-encoding:"
            " chunked\r\n\r\n".encode()
        )

    async def end(self) -> None:
        await self.send(b"0\r\n\r\n")

    async def reply(
        self,
        body: bytes,
        status: str = "200 OK",
        headers: str = "content-type: application/json\r\n",
    ) -> None:
        await self.send(
            f"HTTP/1.1 {status}\r\n{headers}content-length: {len(body)}\r\n\r\n".encode() + body
        )

    def close(self) -> None:
        """Closes at once, as the kernel does for a process that died."""
        self.dead = True
        self._writer.close()

    def abort(self) -> None:
        self._writer.transport.abort()

    async def _chunks(self) -> bytes:
        body = b""
        while size := int(await self._reader.readline(), 16):
            body += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readline()
        return body

    async def read_requests(self) -> None:
        try:
            while True:
                head = await self._reader.readuntil(b"\r\n\r\n")
                lengths = [
                    line
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length:")
                ]
                body = (
                    await self._reader.readexactly(int(lengths[0].partition(b":")[2]))
                    if lengths
                    else b""
                )
                if b"\r\ntransfer-encoding: chunked\r\n" in head.lower():
                    body = await self._chunks()
                self.requests.append(head + body)
                self.queue.put_nowait(head + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed.set()
            self.queue.put_nowait(None)


class Upstream:
    """Serves `script` while entered. `calls` are all connections so far, in the order they came."""

    def __init__(self, script: Callable[[Call], Awaitable[None]]) -> None:
        self._script = script
        self._handlers: set[asyncio.Task[None]] = set()
        # These handlers are not closing their connection yet.
        self._scripts: set[asyncio.Task[None]] = set()
        self.calls: list[Call] = []
        self.url = ""

    async def __aenter__(self) -> Upstream:
        self._server = await asyncio.start_server(
            self._accept, "127.0.0.1", 0, limit=64 * 1024 * 1024, backlog=512
        )
        self.url = "http://127.0.0.1:{1}".format(*self._server.sockets[0].getsockname())
        return self

    async def __aexit__(self, *_: object) -> None:
        # No more is accepted before it is closed: when a server is closed, asyncio drops the
        # connection that was accepted last, with its socket open.
        for listener in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listener.fileno())
        for _turn in range(4):  # the loop reports the last accepted connection
            await asyncio.sleep(0)
        self._server.close()
        for handler in self._scripts:
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)
        for call in self.calls:  # of a handler that was cancelled before it began
            call.abort()
        await asyncio.sleep(0)
        await self._server.wait_closed()

    @property
    def requests(self) -> list[bytes]:
        return [request for call in self.calls for request in call.requests]

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        call = Call(reader, writer)
        self.calls.append(call)
        handler = asyncio.create_task(self._serve(call, writer))
        self._handlers.add(handler)
        self._scripts.add(handler)

    async def _serve(self, call: Call, writer: asyncio.StreamWriter) -> None:
        handler = asyncio.current_task()
        assert handler is not None
        reading = asyncio.create_task(call.read_requests())
        try:
            while not call.dead and await call.queue.get() is not None:
                with suppress(ConnectionError):
                    await self._script(call)
        except asyncio.CancelledError:
            pass  # the server's own task: nobody awaits it, so its end is its own affair
        finally:
            self._scripts.discard(handler)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            self._handlers.discard(handler)
