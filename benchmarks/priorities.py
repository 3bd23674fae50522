"""Chats and batches of one model, on real sockets.

    python -m benchmarks.priorities [--seconds 20] [--places 32 64]
    python -m benchmarks.priorities --engine http://127.0.0.1:8000 --model NAME --places 8

200 requests of class `batch` are always in flight, of 200 tokens each. 20 clients of class
`interactive` ask for 40 tokens, read them, and ask again after a second. Printed:

first token  of chats alone and next to the batch, in ms; the goal is 1.2 times the p95 of alone
batch        tokens per second alone: straight from the engine, and through the gateway; the goal is
             a loss of 10 %
longest      the longest wait of a batch request for its first token, next to the chats
flood        the part of all ended requests that are of the batch, next to 100 chats without pauses;
             a share above 0 is the bound against starvation

The scripted engine computes in steps: 25 ms, 0.05 ms for each running request, and 5 ms for each
prompt that it begins. A step gives each running request a token. It runs `places` requests, and
orders the others by priority, as vLLM does with --scheduling-policy=priority. A gateway stands
before it, and all are processes. With --engine the engine is a real one. --slow 8 makes all steps
and pauses eight times as long, for a machine that has other work.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools
import uvicorn

from gateway.proxy.client_connection import client_protocol
from gateway.proxy.data_plane import DataPlane
from gateway.proxy.limits import Limits
from gateway.proxy.routing.model_route import ModelRoute, RoutedReplica
from gateway.proxy.routing.route_table import RouteTable
from gateway.proxy.routing.routes import Routes
from tests.support.dataplane import DONE, Everyone, echo, event
from tests.support.quantiles import quantile_s
from tests.support.upstream import Call, Upstream

STEP_S, RUNNING_S, PROMPT_S = 0.025, 0.00005, 0.005
BATCHES, CHATS, FLOOD = 200, 20, 100
BATCH_TOKENS, CHAT_TOKENS = 200, 40
PAUSE_S = 1.0
REST_S = 3.0
_PRIORITY = re.compile(rb'"priority":(-?\d+)')
_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')


class StepEngine:
    """An engine that computes in steps."""

    def __init__(self, places: int, slow: float) -> None:
        self._places = places
        self._slow = slow
        self._order = itertools.count()
        self._waiting: list[tuple[int, int, Call, int]] = []
        self._running: dict[Call, int] = {}
        self._ends: dict[Call, asyncio.Event] = {}

    async def script(self, call: Call) -> None:
        priority, tokens = _PRIORITY.search(call.body), _TOKENS.search(call.body)
        rank = int(priority[1]) if priority is not None else 0
        count = int(tokens[1]) if tokens is not None else 1
        ended = self._ends[call] = asyncio.Event()
        self._waiting.append((rank, next(self._order), call, count))
        await ended.wait()

    async def run(self) -> None:
        while True:
            self._waiting.sort(key=lambda row: row[:2])
            for row in [row for row in self._waiting if row[2].closed.is_set()]:
                self._waiting.remove(row)
                self._ends.pop(row[2]).set()
            room = self._places - len(self._running)
            begun, self._waiting = self._waiting[:room], self._waiting[room:]
            self._running |= {call: count for _, _, call, count in begun}
            step_s = STEP_S + RUNNING_S * len(self._running) + PROMPT_S * len(begun)
            await asyncio.sleep(self._slow * (step_s if self._running else STEP_S / 5))
            for _, _, call, _ in begun:
                with suppress(ConnectionError):
                    await call.start()
            for call, left in list(self._running.items()):
                with suppress(ConnectionError):
                    await call.chunk(event("word "))
                self._running[call] = left - 1
                if left == 1 or call.closed.is_set():
                    with suppress(ConnectionError):
                        await call.chunk(DONE)
                        await call.end()
                    del self._running[call]
                    self._ends.pop(call).set()


def engine(pipe: Connection, places: int, slow: float) -> None:
    """The process of the engine, which sends its URL through the pipe."""

    async def run() -> None:
        steps = StepEngine(places, slow)
        async with Upstream(steps.script) as upstream:
            pipe.send(upstream.url)
            await steps.run()

    asyncio.run(run())


def gateway(pipe: Connection, url: str, model: str, places: int) -> None:
    """The process of the gateway, which sends its URL through the pipe."""
    capacity = places + places // 4
    replica = RoutedReplica(url, "m.0", model, capacity, priority_factor=1)
    table = RouteTable({"m": ModelRoute("m", "ready", "", 0, (replica,), "generate")})
    plane = DataPlane(
        Routes(table, 1000), Everyone(), Limits(connections=2000, connections_per_address=2000)
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    pipe.send(f"http://127.0.0.1:{listener.getsockname()[1]}")
    uvicorn.Server(
        uvicorn.Config(echo, http=client_protocol(plane), lifespan="off", log_config=None)
    ).run(sockets=[listener])


@contextmanager
def process(target: Any, *arguments: object) -> Iterator[str]:
    """A process that says its URL."""
    mine, theirs = multiprocessing.Pipe()
    child = multiprocessing.Process(target=target, args=(theirs, *arguments), daemon=True)
    child.start()
    try:
        yield mine.recv()
    finally:
        child.terminate()
        child.join()


class Client(asyncio.Protocol):
    """A connection for streams one after the other."""

    def __init__(self, class_: str, tokens: int, model: str, place: int) -> None:
        messages = [{"role": "user", "content": f"{class_} {place} " + "word " * 60}]
        body = {"model": model, "messages": messages, "max_tokens": tokens, "stream": True}
        data = json.dumps({**body, "ignore_eos": True}).encode()
        self._request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"x-fitserve-priority: %b\r\ncontent-length: %d\r\n\r\n%b"
        ) % (class_.encode(), len(data), data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._end: asyncio.Future[None] | None = None

    async def ask(self) -> tuple[float, float, int]:
        """Seconds to the first token and to the end, and the number of pieces."""
        self._parser = httptools.HttpResponseParser(self)
        self._end = asyncio.get_running_loop().create_future()
        self._pieces, self._first_at, began = 0, 0.0, time.perf_counter()
        self._transport.write(self._request)
        await self._end
        if (status := self._parser.get_status_code()) != 200:
            raise SystemExit(f"the answer has the status {status}")
        return self._first_at - began, time.perf_counter() - began, self._pieces

    def close(self) -> None:
        """Leave immediately: the engine drops the request."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._pieces += data.count(b"data: {")
        if not self._first_at and b'"content":' in data:
            self._first_at = time.perf_counter()
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        if self._end is not None:
            self._end.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_exception(error or ConnectionError("closed"))


class Crowd(NamedTuple):
    """Clients of one class. pause_s: between an answer and the next request."""

    class_: str
    clients: int
    tokens: int
    pause_s: float


class Seen(NamedTuple):
    """firsts: seconds to the first tokens. ended: requests. tokens_s: tokens per second."""

    firsts: list[float]
    ended: int
    tokens_s: float


async def _measure(url: str, model: str, crowds: tuple[Crowd, ...], seconds: float) -> list[Seen]:
    loop, parts = asyncio.get_running_loop(), urlsplit(url)
    settled_at = loop.time() + seconds / 4
    until = settled_at + seconds

    async def client(crowd: Crowd, place: int, firsts: list[float], counts: list[int]) -> None:
        make = lambda: Client(crowd.class_, crowd.tokens, model, place)  # noqa: E731
        _, connection = await loop.create_connection(make, str(parts.hostname), parts.port or 80)
        try:
            await asyncio.sleep(crowd.pause_s * place / crowd.clients)
            while True:
                first_s, _, pieces = await connection.ask()
                if loop.time() > settled_at:
                    firsts.append(first_s)
                    counts.append(pieces)
                await asyncio.sleep(crowd.pause_s)
        finally:
            connection.close()

    results: list[tuple[list[float], list[int]]] = [([], []) for _ in crowds]
    tasks = [
        asyncio.create_task(client(crowd, place, *result))
        for crowd, result in zip(crowds, results, strict=True)
        for place in range(crowd.clients)
    ]
    await asyncio.wait(tasks, timeout=until - loop.time(), return_when="FIRST_EXCEPTION")
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    # The engine forgets the requests of clients that left, at its next step.
    await asyncio.sleep(REST_S)
    return [Seen(firsts, len(counts), sum(counts) / seconds) for firsts, counts in results]


def measure(url: str, model: str, seconds: float, *crowds: Crowd) -> list[Seen]:
    return asyncio.run(_measure(url, model, crowds, seconds))


def report(direct_url: str, model: str, places: int, options: argparse.Namespace) -> None:
    batch = Crowd("batch", options.batches, options.batch_tokens, 0.0)
    chats = Crowd("interactive", options.chats, options.chat_tokens, PAUSE_S * options.slow)
    flood = chats._replace(clients=options.chats * FLOOD // CHATS, pause_s=0.0)
    seconds = options.seconds
    (direct,) = measure(direct_url, model, seconds, batch)
    with process(gateway, direct_url, model, places) as url:
        (batch_alone,) = measure(url, "m", seconds, batch)
        (chats_alone,) = measure(url, "m", seconds, chats)
        chats_beside, batch_beside = measure(url, "m", seconds, chats, batch)
        flooding, flooded = measure(url, "m", seconds, flood, batch)
    alone, shared = (
        [quantile_s(seen.firsts, share) * 1000 for share in (0.5, 0.95)]
        for seen in (chats_alone, chats_beside)
    )
    share = flooded.ended / max(1, flooded.ended + flooding.ended)
    loss = 1 - batch_alone.tokens_s / direct.tokens_s
    print(
        f"{places:>6}{alone[0]:>10.0f}{alone[1]:>8.0f}{shared[0]:>10.0f}{shared[1]:>8.0f}"
        f"{shared[1] / alone[1]:>7.2f}{direct.tokens_s:>10.0f}{batch_alone.tokens_s:>8.0f}"
        f"{loss:>8.1%}{batch_beside.tokens_s:>9.0f}{max(batch_beside.firsts, default=0):>9.1f} s"
        f"{share:>8.1%}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--places", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--engine", help="URL of a real engine, which --places describes")
    parser.add_argument("--model", default="m", help="its name at that engine")
    parser.add_argument("--batches", type=int, default=BATCHES)
    parser.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS)
    parser.add_argument("--chats", type=int, default=CHATS)
    parser.add_argument("--chat-tokens", type=int, default=CHAT_TOKENS)
    parser.add_argument("--slow", type=float, default=1.0)
    options = parser.parse_args()
    print("       chats alone      with the batch          batch: direct   gateway, loss,  shared")
    print(
        "places  p50 ms  p95 ms    p50 ms  p95 ms  times   tokens/s               longest   flood"
    )
    for places in options.places:
        if options.engine:
            report(options.engine, options.model, places, options)
        else:
            with process(engine, places, options.slow) as url:
                report(url, "m", places, options)


if __name__ == "__main__":
    main()
