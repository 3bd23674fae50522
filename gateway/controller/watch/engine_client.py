"""The HTTP client of the gateway's own calls to engines: health, model names, proofs.

Requests of clients go through gateway/proxy.

An engine may be any program that listens on a port. So the size and time of its answer are bounded,
and the answer must be plain: no encoding that unpacks into more, and no redirect. JSON is decoded
into the wanted type, so other members make no objects.

Each call has its own connection. So it may be ended at any moment, and meets the same conditions as
a new client.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httptools
import msgspec

from gateway.decoding import DECODE_ERRORS
from gateway.diagnosis.lines.log_lines import clean
from gateway.errors import short_reason
from gateway.secret import Secret, bearer_line

T = TypeVar("T")

CONNECT_S = 5.0
SMALL_BYTES = 64 * 1024
LARGE_BYTES = 4 * 1024 * 1024
# Decoding up to this size takes less time than handing it to a thread.
_INLINE_DECODE_BYTES = 16 * 1024
_EXCERPT_CHARACTERS = 200
_tls_context = functools.cache(ssl.create_default_context)


class NoAnswerError(Exception):
    """The engine gave no usable answer. The text continues its name: "does not answer (connection
    refused)"."""


@dataclass(frozen=True, slots=True)
class EngineResponse:
    """A whole answer; `body` is complete."""

    status: int
    body: bytes

    @property
    def excerpt(self) -> str:
        """The beginning of the body, cleaned for display."""
        text = clean(self.body[:_EXCERPT_CHARACTERS].replace(b"\r", b" ").replace(b"\n", b" "))
        return "".join(char if char.isprintable() else " " for char in text)

    async def read(self, kind: type[T]) -> T:
        """The body decoded from JSON. Raises NoAnswerError."""
        decode = functools.partial(msgspec.json.decode, self.body, type=kind)
        try:
            return (
                decode()
                if len(self.body) <= _INLINE_DECODE_BYTES
                else await asyncio.to_thread(decode)
            )
        except DECODE_ERRORS as error:
            raise NoAnswerError(
                f"gives an unexpected answer ({str(error)[:_EXCERPT_CHARACTERS]})"
            ) from None


class EngineClient:
    """Makes calls, at most `at_once` at a time. The time of a call begins with its turn."""

    def __init__(self, at_once: int | asyncio.Semaphore, key: Secret | None = None) -> None:
        self._permits = asyncio.Semaphore(at_once) if isinstance(at_once, int) else at_once
        self._key_line = bearer_line(key)

    def keyed_client(self, key: Secret | None) -> EngineClient:
        """A client for an engine that needs this key. The client shares the limit on calls."""
        return EngineClient(self._permits, key)

    async def get(self, url: str, within_s: float, most_bytes: int = SMALL_BYTES) -> EngineResponse:
        """GET a URL. Raises NoAnswerError."""
        return await self._query("GET", url, b"", within_s, most_bytes)

    async def post(
        self, url: str, body: Any, within_s: float, most_bytes: int = LARGE_BYTES
    ) -> EngineResponse:
        """POST `body` as JSON. Raises NoAnswerError."""
        return await self._query("POST", url, msgspec.json.encode(body), within_s, most_bytes)

    async def post_form(
        self, url: str, body: bytes, boundary: bytes, within_s: float
    ) -> EngineResponse:
        """POST an encoded multipart form. Raises NoAnswerError."""
        kind = b"multipart/form-data; boundary=" + boundary
        return await self._query("POST", url, body, within_s, LARGE_BYTES, kind=kind)

    async def send(self, url: str, body: bytes, lines: bytes, within_s: float) -> EngineResponse:
        """POST an encoded JSON body with more header lines, each with its line end. Raises
        NoAnswerError."""
        return await self._query(
            method="POST",
            url=url,
            body=body,
            within_s=within_s,
            most_bytes=SMALL_BYTES,
            lines=lines,
        )

    async def _query(
        self,
        method: str,
        url: str,
        body: bytes,
        within_s: float,
        most_bytes: int,
        lines: bytes = b"",
        kind: bytes = b"application/json",
    ) -> EngineResponse:
        """Send a request to an engine, and read its answer. Raises NoAnswerError."""
        try:
            host, port, secure, request = _request(method, url)
        except ValueError:
            raise NoAnswerError("has an address that is not a URL") from None
        request += self._key_line + lines
        if body:
            request += b"content-type: %b\r\ncontent-length: %d\r\n" % (kind, len(body))
        async with self._permits:
            loop = asyncio.get_running_loop()
            call = _HttpCall(b"%b\r\n%b" % (request, body), most_bytes, loop.create_future())
            try:
                async with asyncio.timeout(within_s):
                    tls = await asyncio.to_thread(_tls_context) if secure else None
                    connecting = loop.create_connection(lambda: call, host, port, ssl=tls)
                    # A slow answer is allowed, a slow connection is not.
                    async with asyncio.timeout(min(within_s, CONNECT_S)):
                        await connecting
                    return await call.answer
            except TimeoutError:
                raise NoAnswerError(f"does not answer within {within_s:g} s") from None
            except (OSError, UnicodeError) as error:
                raise NoAnswerError(f"does not answer ({short_reason(error)})") from None
            finally:
                call.close()


@functools.lru_cache(512)
def _request(method: str, url: str) -> tuple[str, int, bool, bytes]:
    """Host, port, TLS, and the constant part of the request's head. Raises ValueError."""
    url_parts = urlsplit(url)
    is_secure = url_parts.scheme == "https"
    target = (
        f"{url_parts.path or '/'}?{url_parts.query}" if url_parts.query else url_parts.path or "/"
    )
    head = (
        f"{method} {target} HTTP/1.1\r\nhost: {url_parts.netloc}\r\nconnection: close\r\naccept:"
        " */*\r\naccept-encoding: identity\r\n"
    )
    return (
        url_parts.hostname or "",
        url_parts.port or (443 if is_secure else 80),
        is_secure,
        head.encode("ascii"),
    )


class _HttpCall(asyncio.Protocol):
    """One request on one connection. `answer` is its result."""

    def __init__(
        self, request: bytes, most_bytes: int, answer: asyncio.Future[EngineResponse]
    ) -> None:
        self.answer = answer
        self._request = request
        self._bytes_left = most_bytes
        self._max_bytes = most_bytes
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._is_sized = False
        self._encoding = b""
        self._body = bytearray()

    def close(self) -> None:
        """Close immediately."""
        if not self.answer.cancel() and not self.answer.cancelled():
            self.answer.exception()  # retrieved, or no task waits for it any more
        if self._transport is not None:
            self._transport.abort()

    # --- the transport's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._transport.write(self._request)  # type: ignore[union-attr]

    def data_received(self, data: bytes) -> None:
        # All bytes count: head, body, and framing.
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            self._refuse_answer(f"answers with more than {self._max_bytes} bytes")
        if self.answer.done():
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._refuse_answer("does not speak HTTP")

    def eof_received(self) -> None:
        self._handle_close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._handle_close(exc)

    def _handle_close(self, error: Exception | None = None) -> None:
        if self._status and not self._is_sized and error is None:
            self.on_message_complete()
        self._refuse_answer(
            f"breaks off ({short_reason(error)})"
            if error
            else "closes the connection without an answer"
        )

    def _refuse_answer(self, reason: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(NoAnswerError(reason))

    # --- the parser's side ---

    def on_message_begin(self) -> None:
        self._is_sized = False
        self._encoding = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-encoding":
            self._encoding = value.strip().lower()
        elif name in (b"content-length", b"transfer-encoding"):
            self._is_sized = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self._status = status
            if self._encoding not in (b"", b"identity"):
                self._refuse_answer("encodes its answer against the request")

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        if self._status and not self.answer.done():
            self.answer.set_result(EngineResponse(self._status, bytes(self._body)))
