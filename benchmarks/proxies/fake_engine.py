"""A stand-in for an engine that is never the bottleneck.

    python fake_engine.py PORT [--log FILE]

Answers are prebuilt, each stream has one timer, and only the frame is parsed. GET
/pace?chunks=100&interval_ms=20 sets the pace of later streams: the first chunk without delay, the
others each `interval_ms` later, then the end of the choice and [DONE]. --log appends every byte
that is received.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import BinaryIO, cast
from urllib.parse import parse_qs, urlsplit

import httptools
import uvloop

HEAD = {"id": "chatcmpl-1", "created": 1, "model": "m"}
USAGE = {"prompt_tokens": 10, "completion_tokens": 20, "total_tokens": 30}
KEPT_BYTES = 64 * 1024  # of a body; longer ones are not streams


def answer(value: object) -> bytes:
    body = json.dumps(value).encode()
    return (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % len(body)
        + body
    )


def chunk(event: bytes) -> bytes:
    data = b"data: " + event + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(delta: dict[str, str], finish_reason: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return chunk(
        json.dumps({**HEAD, "object": "chat.completion.chunk", "choices": [choice]}).encode()
    )


MESSAGE = {"role": "assistant", "content": "hello " * 20}
ANSWER = answer(
    {
        **HEAD,
        "object": "chat.completion",
        "choices": [{"index": 0, "message": MESSAGE, "finish_reason": "stop"}],
        "usage": USAGE,
    }
)
MODELS = answer(
    {"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "x"}]}
)
# The questions of routers before their first request.
INFO = answer(
    {
        "model_path": "m",
        "served_model_name": "m",
        "is_generation": True,
        "tp_size": 1,
        "dp_size": 1,
        "version": "0",
        "status": "ok",
    }
)
STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding:"
    b" chunked\r\n\r\n"
)
CHUNK = event({"content": " hello"}, None)
END = event({}, "stop") + chunk(b"[DONE]") + b"0\r\n\r\n"


class Pace:
    chunks = 100
    interval_s = 0.02


class Engine(asyncio.Protocol):
    """One connection; requests come one after the other."""

    def __init__(self, pace: Pace, log: BinaryIO | None) -> None:
        self.speed_knowledge = pace
        self.log = log
        self.loop = asyncio.get_running_loop()
        self.timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.parser = httptools.HttpRequestParser(self)

    def connection_lost(self, _error: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self.log is not None:
            self.log.write(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.close()

    # --- the parser calls these ---

    def on_message_begin(self) -> None:
        self.body = bytearray()
        self.url = b""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_body(self, data: bytes) -> None:
        if len(self.body) < KEPT_BYTES:
            self.body += data

    def on_message_complete(self) -> None:
        if self.url.startswith(b"/pace?"):
            asked = parse_qs(urlsplit(self.url).query.decode())
            self.speed_knowledge.chunks = int(asked["chunks"][0])
            self.speed_knowledge.interval_s = float(asked["interval_ms"][0]) / 1000
            self.transport.write(INFO)
        elif self.url.startswith(b"/v1/models"):
            self.transport.write(MODELS)
        elif not self.url.startswith(b"/v1/"):
            self.transport.write(INFO)
        elif len(self.body) < KEPT_BYTES and (
            b'"stream":true' in self.body or b'"stream": true' in self.body
        ):
            self.left = self.speed_knowledge.chunks
            self.interval_s = self.speed_knowledge.interval_s
            self.due = self.loop.time()
            self.transport.write(STREAM)
            self.next_chunk()
        else:
            self.transport.write(ANSWER)

    def next_chunk(self) -> None:
        if self.left == 0:
            self.transport.write(END)
            return
        self.transport.write(CHUNK)
        self.left -= 1
        self.due += self.interval_s
        self.timer = self.loop.call_at(self.due, self.next_chunk)


async def serve(port: int, log: BinaryIO | None) -> None:
    pace = Pace()
    server = await asyncio.get_running_loop().create_server(
        lambda: Engine(pace, log), "127.0.0.1", port, backlog=4096
    )
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("port", type=int)
    parser.add_argument("--log", type=Path)
    options = parser.parse_args()
    log = options.log.open("ab", buffering=0) if options.log else None
    uvloop.run(serve(options.port, log))


if __name__ == "__main__":
    main()
