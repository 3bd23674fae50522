"""A model under more load than its engines can serve.

    python -m benchmarks.overload [--seconds 10]

Two engines with a fixed number of places and a fixed time per request stand behind one gateway, all
processes. Clients arrive at a fixed rate. Printed for each load, in shares of the capacity:

goodput      answers per second; 100 % is every place taken all the time
refused      share of all requests, and the time of a refusal from the last byte of the request
waited       time of answered requests beyond their service time

Targets: goodput of 90 % at three times the load, refusals within 20 ms. `no limit` is a gateway
that does not know the capacity of its engines: all requests wait there, longer and longer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import httptools
import uvicorn

from gateway.proxy.client_connection import client_protocol
from gateway.proxy.data_plane import DataPlane
from gateway.proxy.limits import Limits
from gateway.proxy.routing.model_route import ModelRoute, RoutedReplica
from gateway.proxy.routing.route_table import RouteTable
from gateway.proxy.routing.routes import Routes
from tests.support.dataplane import Everyone, echo
from tests.support.quantiles import quantile_s
from tests.support.upstream import Call, Upstream

SLOTS = 16
SERVICE_S = 0.2
ENGINES = 2
CAN_DO = ENGINES * SLOTS / SERVICE_S  # requests per second
ANSWER = json.dumps(
    {
        "id": "c",
        "choices": [],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
).encode()
BODY = json.dumps(
    {"model": "m", "messages": [{"role": "user", "content": "x" * 1000}], "max_tokens": 100}
).encode()


def engines(pipe: Connection) -> None:
    """The engines' process. It says where they are."""

    def places() -> Callable[[Call], Any]:
        free = asyncio.Semaphore(SLOTS)

        async def script(call: Call) -> None:
            async with free:
                await asyncio.sleep(SERVICE_S)
            await call.reply(ANSWER)

        return script

    async def run() -> None:
        async with Upstream(places()) as upstream, Upstream(places()) as two:
            pipe.send([upstream.url, two.url])
            await asyncio.Event().wait()

    asyncio.run(run())


def gateway(pipe: Connection, urls: list[str], capacity: int | None, queue: int | None) -> None:
    """The gateway's process. It says its port."""
    replicas = tuple(
        RoutedReplica(url, f"m.{index}", "m", capacity) for index, url in enumerate(urls)
    )
    table = RouteTable({"m": ModelRoute("m", "ready", "", 0, replicas, "generate")})
    plane = DataPlane(
        Routes(table, queue), Everyone(), Limits(connections=20_000, connections_per_address=20_000)
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    pipe.send(listener.getsockname()[1])
    uvicorn.Server(
        uvicorn.Config(echo, http=client_protocol(plane), lifespan="off", log_config=None)
    ).run(sockets=[listener])


class Client(asyncio.Protocol):
    """A connection for requests one after the other."""

    def __init__(self, load: Load) -> None:
        self._load = load

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self._parser: Any = None

    def ask(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._began = time.perf_counter()
        self.transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._load.finish(self, self._parser.get_status_code(), time.perf_counter() - self._began)


class Load:
    """Requests at a fixed rate."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[Client] = []
        self.seconds: dict[int, list[float]] = {}
        self.ended: list[float] = []
        self.request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
            % (len(BODY), BODY)
        )

    def finish(self, client: Client, status: int, seconds: float) -> None:
        self.seconds.setdefault(status, []).append(seconds)
        if status == 200:
            self.ended.append(time.perf_counter())
        self._idle.append(client)

    async def run(self, rate: float, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        opening: set[asyncio.Task[None]] = set()

        async def first() -> None:
            _, client = await loop.create_connection(lambda: Client(self), "127.0.0.1", self._port)
            client.ask()

        self.began, sent = time.perf_counter(), 0
        while (now := time.perf_counter() - self.began) < seconds:
            while sent < now * rate:
                sent += 1
                if self._idle:
                    self._idle.pop().ask()
                else:
                    task = asyncio.create_task(first())
                    opening.add(task)
                    task.add_done_callback(opening.discard)
            await asyncio.sleep(0.002)
        self.sent = sent
        self.until = time.perf_counter()


def measure(
    name: str,
    urls: list[str],
    times: float,
    seconds: float,
    capacity: int | None,
    queue: int | None,
) -> str:
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(
        target=gateway, args=(theirs, urls, capacity, queue), daemon=True
    )
    process.start()
    try:
        load = Load(mine.recv())
        asyncio.run(load.run(times * CAN_DO, seconds))
    finally:
        process.terminate()
        process.join()
    settled = load.began + min(2.0, seconds / 3)
    goodput = sum(settled < at <= load.until for at in load.ended) / (load.until - settled) / CAN_DO
    good, refused = load.seconds.get(200, []), load.seconds.get(429, [])
    others = sum(len(each) for status, each in load.seconds.items() if status not in (200, 429))
    shown = [
        (
            f"{name:<9}{times:>4g}x{load.sent / seconds:>8.0f}/s{goodput:>9.1%}"
            f"{len(refused) / load.sent:>10.1%}"
        ),
        *(f"{quantile_s(refused, share) * 1000:>9.1f}" for share in (0.5, 0.99)),
        *(f"{(quantile_s(good, share) - SERVICE_S) * 1000:>9.0f}" for share in (0.5, 0.99)),
    ]
    return "".join(shown) + f"{others:>8}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=engines, args=(theirs,), daemon=True)
    process.start()
    urls = mine.recv()
    capacity = SLOTS + SLOTS // 4
    print(
        f"{ENGINES} engines, {SLOTS} concurrent requests each, {SERVICE_S * 1000:g} ms per request:"
        f" {CAN_DO:g} requests/s"
    )
    print(
        "                         goodput   refused   refusal p50, p99 ms   waited p50, p99 ms  "
        " other"
    )
    try:
        for times in (0.8, 1.5, 3.0, 6.0):
            print(measure("queue", urls, times, options.seconds, capacity, None), flush=True)
        for times in (1.5, 3.0):
            print(measure("no limit", urls, times, options.seconds, None, None), flush=True)
    finally:
        process.terminate()


if __name__ == "__main__":
    main()
