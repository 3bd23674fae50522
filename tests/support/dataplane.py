"""The data plane on a real socket, and scripts for the engines behind it."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import httpx
import uvicorn
import uvloop
from uvicorn.server import ServerState

from gateway.errors import FitserveError
from gateway.proxy.access.auth import ANONYMOUS_KEY, Key, Keys
from gateway.proxy.client_connection import ClientConnection, client_protocol
from gateway.proxy.data_plane import DataPlane
from gateway.proxy.exchange import Exchange
from gateway.proxy.limits import Limits
from gateway.proxy.meter import Meter
from gateway.proxy.routing.model_route import ModelRoute, RoutedReplica
from gateway.proxy.routing.route_table import RouteTable
from gateway.proxy.routing.routes import Routes
from tests.support.patience import Patience, hang_s
from tests.support.upstream import Call, Upstream

LIMIT = 16 * 1024 * 1024
CHAT = "/v1/chat/completions"
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ANSWER = {
    "id": "c1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "héllo"}, "finish_reason": "stop"}
    ],
}


# The end of a stream of chat completions, without which the answer counts as broken.
DONE = b"data: [DONE]\n\n"


def event(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    value = {
        "id": "c1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
    }
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def model(*urls: str, name: str = "m", served: str = "m", task: str | None = None) -> ModelRoute:
    replicas = tuple(
        RoutedReplica(url, f"{name}-{index}", served) for index, url in enumerate(urls)
    )
    return ModelRoute(name, "ready", "", 1700000000, replicas, task)


class Everyone(Keys):
    """No keys, and no check of `Host` either."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def authenticate(self, headers: Any, need: str, address: str) -> Key:
        return ANONYMOUS_KEY


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """A stand-in for FastAPI. The answer repeats path and body."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close"})
        return
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    answer = scope["path"].encode() + b" " + body
    headers = [(b"content-length", b"%d" % len(answer)), (b"x-asgi", b"1")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


class Hog:
    """Keeps memory for bodies, under a name of its own."""

    account = "hog"
    moved_bytes = 0

    def continue_body(self) -> None: ...

    def reject(self, error: FitserveError) -> None: ...


class _Loop(uvloop.Loop):
    """Its clock stands at `now`, where that is not None. Timers run as ever."""

    now: float | None = None

    def time(self) -> float:
        return super().time() if self.now is None else self.now


class Gateway:
    """The data plane on a free port, in a thread with its own event loop. `tasks` counts the tasks
    of that loop.

    stands_still: its clock stands, and moves by `later` alone, so that no time-out depends on the
    speed of this machine.
    """

    def __init__(
        self,
        keys: Keys | None = None,
        meter: Meter | None = None,
        app: Any = None,
        queue_per_model: int | None = None,
        *,
        stands_still: bool = False,
        tls: ssl.SSLContext | None = None,
        **limits: Any,
    ) -> None:
        self.routes = Routes(queue_per_model=queue_per_model)
        self.plane = DataPlane(
            self.routes, keys or Everyone(), Limits(**{"body_bytes": LIMIT, **limits}), meter
        )
        self._app = app or echo
        self._stands_still = stands_still
        self._tls = tls
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Gateway:
        config = uvicorn.Config(
            self._app,
            http=client_protocol(self.plane, self._tls),
            interface="asgi3",
            lifespan="off",
            log_config=None,
            server_header=False,
            date_header=False,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the gateway did not start"
            time.sleep(0.005)
        self.idle_tasks = self.tasks()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(hang_s())
        self._socket.close()
        assert not self._thread.is_alive()

    def _run(self) -> None:
        self._loop = _Loop()
        self._loop.now = self._loop.time() if self._stands_still else None
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        await self._server.serve(sockets=[self._socket])
        self.plane.close()

    def route(self, *models: ModelRoute) -> None:
        async def swap() -> None:
            self.routes.table = RouteTable({})  # forgets the last choice
            self.routes.table = RouteTable({route.name: route for route in models})

        asyncio.run_coroutine_threadsafe(swap(), self._loop).result(hang_s())

    def later(self, seconds: float) -> None:
        """`seconds` later by the clock of the data plane, it looks at its connections, as it does
        twice a second."""

        async def look() -> None:
            self._loop.now = self._loop.time() + seconds
            if self.plane._timer is not None:
                self.plane._timer.cancel()
                self.plane._sweep()

        asyncio.run_coroutine_threadsafe(look(), self._loop).result(hang_s())

    def catch_up(self) -> None:
        """Returns when the loop is through with its present work, of which a part follows the
        answer."""
        self.tasks()

    @contextmanager
    def stopped_loop(self) -> Iterator[None]:
        """The loop does nothing meanwhile, so that bytes of several clients wait for it."""
        has_stopped = threading.Event()
        may_continue = threading.Event()

        def stop() -> None:
            has_stopped.set()
            may_continue.wait(hang_s())

        self._loop.call_soon_threadsafe(stop)
        assert has_stopped.wait(hang_s())
        yield
        may_continue.set()

    def tasks(self) -> int:
        async def count() -> int:
            return len(asyncio.all_tasks())

        return asyncio.run_coroutine_threadsafe(count(), self._loop).result(hang_s())

    async def wait_until_settled(self) -> None:
        """Waits until nothing is in flight and no task is left."""
        await until(lambda: self.routes.total_in_flight == 0 and self.tasks() == self.idle_tasks)


@asynccontextmanager
async def local(url: str, **limits: Any) -> AsyncIterator[tuple[DataPlane, int]]:
    """The data plane in this event loop, with `url` as the engine of model `m`. Gives its port
    too."""
    loop = asyncio.get_running_loop()
    plane = DataPlane(
        Routes(RouteTable({"m": model(url)})), Everyone(), Limits(**{"body_bytes": LIMIT, **limits})
    )
    config = uvicorn.Config(echo, http=client_protocol(plane), lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    server = await loop.create_server(
        lambda: config.http_protocol_class(config, state, {}, loop),  # type: ignore[call-arg]
        "127.0.0.1",
        0,
    )
    try:
        yield plane, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        plane.close()
        for connection in list(state.connections):
            connection.transport.abort()
        await until(lambda: not plane.connections)


async def until(condition: Callable[[], bool]) -> None:
    patience = Patience()
    while not condition():
        if patience.is_over():
            raise TimeoutError
        await asyncio.sleep(0.005)


def reads_on(front: ClientConnection) -> bool:
    """Whether the engine that answers this client's request is read; it is not while the client
    takes too little."""
    assert isinstance(front, ClientConnection)
    exchange = front._current_exchange
    return (
        not isinstance(exchange, Exchange)
        or exchange._upstream is None
        or exchange._upstream.transport.is_reading()
    )


@asynccontextmanager
async def stage(
    gateway: Gateway, *scripts: Callable[[Call], Awaitable[None]], served: str = "m"
) -> AsyncIterator[list[Upstream]]:
    """The gateway's model `m` gets one replica per script. At the end nothing may be left
    behind."""
    async with AsyncExitStack() as stack:
        upstreams = [await stack.enter_async_context(Upstream(script)) for script in scripts]
        gateway.route(model(*(upstream.url for upstream in upstreams), served=served))
        yield upstreams
        await gateway.wait_until_settled()


def http_client(gateway: Gateway) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=gateway.url, timeout=hang_s(), trust_env=False, verify=False)


def raw_request(body: bytes, path: str = CHAT, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length:"
        f" {size}\r\n\r\n".encode()
        + body
    )


def address(server: socket.socket) -> str:
    return f"http://127.0.0.1:{server.getsockname()[1]}"


_REFUSING: list[socket.socket] = []


def refused_url() -> str:
    """An address that refuses connections. This process keeps it bound, so no other program listens
    there."""
    unix_socket = socket.socket()
    unix_socket.bind(("127.0.0.1", 0))
    _REFUSING.append(unix_socket)
    return address(unix_socket)


async def answers(call: Call) -> None:
    await call.reply(json.dumps(ANSWER).encode())


async def streams_for_ever(call: Call) -> None:
    await call.start()
    await call.chunk(event("first"))
    await call.closed.wait()


async def never_answers(call: Call) -> None:
    await call.closed.wait()


async def connect_without_reading(
    port: int,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client with a buffer of some kilobytes, which reads nothing until `resume`."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
    connection.connect(("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=connection)
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    return reader, writer
