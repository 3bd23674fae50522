"""A client that loads one OpenAI base URL and prints what it saw as one line of JSON.

    load.py URL plain  --connections 32 --seconds 3 [--count N] [--body-bytes 1000]
        requests one after the other on each connection
    load.py URL stream --streams 200 --chunks 100 --deadline 60
        all together, each to its end
    load.py URL idle   --streams 5000 --deadline 40
        opened, then held until stdin ends

An answer counts as good with status 200 and, for a stream, every chunk and [DONE]; anything else is
an error, and the first one is shown. Every request carries the key in FITSERVE_BENCH_KEY, which
targets without keys ignore.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import uvloop

OPENING = 64  # connections on their way at a time: a listen backlog is not what is measured


def looked_at(future: asyncio.Future[None]) -> None:
    """A connection that ends while nobody waits for it is not an error."""
    if not future.cancelled():
        future.exception()


class Connection(asyncio.Protocol):
    """A keep-alive connection. `ask` sends a request; the fields then tell what came of it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.done: asyncio.Future[None] | None = None
        self.first: asyncio.Future[None] | None = None

    def connection_lost(self, _error: Exception | None) -> None:
        for waiting in (self.done, self.first):
            if waiting is not None and not waiting.done():
                waiting.set_exception(
                    ConnectionError("the connection was closed before the answer was complete")
                )

    def ask(self, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.parser = httptools.HttpResponseParser(self)
        self.status, self.chunks, self.last, self.began = 0, 0, b"", time.perf_counter()
        self.first_at = self.ended_at = 0.0
        self.done, self.first = loop.create_future(), loop.create_future()
        for future in (self.done, self.first):
            future.add_done_callback(looked_at)
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self.done is not None and not self.done.done():
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserError as error:
                self.done.set_exception(error)

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self.first is not None and not self.first.done():
            self.first_at = time.perf_counter()
            self.first.set_result(None)
        joined = self.last + data
        self.chunks += joined.count(b"data: ") - self.last.count(b"data: ")
        self.last = joined[-16:]

    def on_message_complete(self) -> None:
        self.ended_at = time.perf_counter()
        if self.done is not None and not self.done.done():
            self.done.set_result(None)


class Load:
    """The requests of one run and their outcome."""

    def __init__(self, url: str, body_bytes: int, *, stream: bool) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "", parts.port or 80
        fields: dict[str, Any] = {
            "model": "m",
            "messages": [{"role": "user", "content": "x" * body_bytes}],
            "max_tokens": 100,
        }
        body = json.dumps(
            {**fields, "stream": True} if stream else fields, separators=(",", ":")
        ).encode()
        head = (
            f"POST {parts.path.rstrip('/')}/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\n"
        )
        head += (
            f"authorization: Bearer {os.environ['FITSERVE_BENCH_KEY']}\r\ncontent-type:"
            " application/json\r\n"
        )
        self.request = head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body
        self.seconds: list[float] = []
        self.first_seconds: list[float] = []
        self.chunks = self.errors = 0
        self.error: str | None = None
        self.opening = asyncio.Semaphore(OPENING)

    def handle_failure(self, why: object) -> None:
        self.errors += 1
        self.error = self.error or str(why)[:300]

    async def connect(self) -> Connection:
        async with self.opening:
            return (
                await asyncio.get_running_loop().create_connection(Connection, self.host, self.port)
            )[1]

    async def plain(self, connections: int, seconds: float, count: int) -> None:
        until, left = time.perf_counter() + seconds, count

        async def one_after_the_other() -> None:
            nonlocal left
            connection: Connection | None = None
            while left > 0 and time.perf_counter() < until:
                left -= 1
                try:
                    if connection is None or connection.transport.is_closing():
                        connection = await self.connect()
                    connection.ask(self.request)
                    assert connection.done is not None
                    await asyncio.wait_for(connection.done, 120)
                except (OSError, TimeoutError, httptools.HttpParserError) as error:
                    self.handle_failure(repr(error))
                    connection = None
                    continue
                if connection.status == 200:
                    self.seconds.append(connection.ended_at - connection.began)
                else:
                    self.handle_failure(f"status {connection.status}: {connection.last!r}")

        await asyncio.gather(*(one_after_the_other() for _ in range(connections)))

    async def stream(self, streams: int, chunks: int, deadline_s: float) -> None:
        async def run_stream() -> None:
            connection = await self.connect()
            try:
                connection.ask(self.request)
                assert connection.done is not None
                await connection.done
                # The chunks, the end of the choice, and [DONE].
                if (
                    connection.status == 200
                    and connection.chunks == chunks + 2
                    and connection.last.rstrip().endswith(b"[DONE]")
                ):
                    self.seconds.append(connection.ended_at - connection.began)
                    self.first_seconds.append(connection.first_at - connection.began)
                else:
                    self.handle_failure(
                        f"status {connection.status}, {connection.chunks} of {chunks + 2} events,"
                        f" {connection.last!r}"
                    )
            finally:
                self.chunks += getattr(connection, "chunks", 0)
                connection.transport.abort()

        tasks = [asyncio.create_task(run_stream()) for _ in range(streams)]
        _, late = await asyncio.wait(tasks, timeout=deadline_s)
        for task in late:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, BaseException):
                self.handle_failure(
                    f"not done within {deadline_s:g} s"
                    if isinstance(outcome, asyncio.CancelledError)
                    else repr(outcome)
                )

    async def idle(self, streams: int, deadline_s: float) -> None:
        """Streams that have had their first chunk; those that have not within the deadline are
        given up."""
        connections: list[Connection] = []
        gate = asyncio.Semaphore(OPENING)

        async def run_stream() -> None:
            async with gate:
                connection = await self.connect()
                connection.ask(self.request)
                assert connection.first is not None
                await connection.first
                connections.append(connection)

        tasks = [asyncio.create_task(run_stream()) for _ in range(streams)]
        _, late = await asyncio.wait(tasks, timeout=deadline_s)
        for task in late:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                self.handle_failure(repr(outcome))
        print(
            json.dumps({"open": len(connections), "errors": self.errors, "error": self.error}),
            flush=True,
        )
        with contextlib.suppress(OSError):
            await asyncio.to_thread(sys.stdin.read)
        for connection in connections:
            connection.transport.abort()


def quantile_ms(values: list[float], share: float) -> float | None:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] * 1000 if values else None


async def run(options: argparse.Namespace) -> None:
    load = Load(options.url, options.body_bytes, stream=options.mode != "plain")
    began = time.perf_counter()
    if options.mode == "idle":
        await load.idle(options.streams, options.deadline)
        return
    if options.mode == "plain":
        await load.plain(options.connections, options.seconds, options.count)
    else:
        await load.stream(options.streams, options.chunks, options.deadline)
    figures = {
        "good": len(load.seconds),
        "errors": load.errors,
        "error": load.error,
        "chunks": load.chunks,
        "wall_s": time.perf_counter() - began,
        "p50_ms": quantile_ms(load.seconds, 0.5),
        "p99_ms": quantile_ms(load.seconds, 0.99),
        "first_p50_ms": quantile_ms(load.first_seconds, 0.5),
        "first_p99_ms": quantile_ms(load.first_seconds, 0.99),
    }
    print(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("mode", choices=["plain", "stream", "idle"])
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--count", type=int, default=1_000_000_000)
    parser.add_argument("--body-bytes", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--chunks", type=int, default=100)
    parser.add_argument("--deadline", type=float, default=60)
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
