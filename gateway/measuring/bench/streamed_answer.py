"""One timed completion over a new connection, with a client that costs little time."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

import httptools

from gateway.secret import Secret, bearer_line

_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_TEXT = b'"text"'
_END = b"[DONE]"
_TAIL = 4000
_EXCERPT = 300


class NoAnswer(Exception):
    """The request got no complete answer; the message has the reason."""


class TimedAnswer(NamedTuple):
    """Seconds from the request to the first token and to the end, and the number of tokens."""

    first_s: float
    whole_s: float
    tokens: int


@dataclass(frozen=True)
class BenchTarget:
    """A model at a base URL without /v1, with its key. vocabulary: number of token ids."""

    url: str
    model: str
    key: Secret | None = None
    vocabulary: int = 20_000
    tls: ssl.SSLContext | None = None

    def request(self, prompt: list[int] | str, tokens: int) -> bytes:
        """The bytes of a request for exactly `tokens` tokens."""
        options = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        body = json.dumps(
            {**options, "stream": True, "stream_options": {"include_usage": True}}
        ).encode()
        url_parts = urlsplit(self.url)
        lines = [
            f"POST {url_parts.path.rstrip('/')}/v1/completions HTTP/1.1",
            f"host: {url_parts.netloc}",
            "connection: close",
        ]
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
        head = "\r\n".join([*lines, ""]).encode()
        return head + bearer_line(self.key) + b"\r\n" + body


async def send_request(target: BenchTarget, request: bytes, limit_s: float) -> TimedAnswer:
    """Send the request and time its answer. Raises NoAnswer."""
    url_parts = urlsplit(target.url)
    loop = asyncio.get_running_loop()
    tls = (target.tls or ssl.create_default_context()) if url_parts.scheme == "https" else None
    port = url_parts.port or (443 if tls else 80)
    stream = _StreamConnection(request, loop.create_future())
    start_s = time.perf_counter()
    try:
        async with asyncio.timeout(limit_s):
            await loop.create_connection(lambda: stream, url_parts.hostname or "", port, ssl=tls)
            end_s = await stream.end_time
    except TimeoutError:
        raise NoAnswer(f"no complete answer within {limit_s:g} s") from None
    except OSError as error:
        raise NoAnswer(f"{error.strerror or error}") from None
    finally:
        stream.close()
    token_counts = _TOKENS.findall(stream.tail)
    if stream.status != 200 or not stream.first or not token_counts or _END not in stream.tail:
        excerpt = " ".join(stream.tail[-_EXCERPT:].decode(errors="replace").split())
        raise NoAnswer(f"status {stream.status}: {excerpt or 'nothing'}")
    return TimedAnswer(stream.first - start_s, end_s - start_s, int(token_counts[-1]))


class _StreamConnection(asyncio.Protocol):
    """The connection of one request. end_time: its end by time.perf_counter."""

    def __init__(self, request: bytes, end_time: asyncio.Future[float]) -> None:
        self.end_time = end_time
        self.first = 0.0
        self.tail = b""
        self.status = 0
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._transport.write(self._request)  # type: ignore[union-attr]

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.close()

    def connection_lost(self, _error: Exception | None) -> None:
        self._finish()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if not self.first and _TEXT in data:
            self.first = time.perf_counter()
        self.tail = (self.tail + data)[-_TAIL:]

    def on_message_complete(self) -> None:
        self._finish()

    def _finish(self) -> None:
        if not self.end_time.done():
            self.end_time.set_result(time.perf_counter())

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
