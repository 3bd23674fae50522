"""Requests of batches to the data plane, as from a client with the same key.

So routes, queue, limits and counts are those of any request. A connection leads into this process
or to a worker, in turn, and is kept for the next line.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import httptools
import msgspec

from gateway.decoding import DECODE_ERRORS
from gateway.errors import NotReady, UpstreamError, short_reason
from gateway.keys import PRIORITIES
from gateway.proxy.access import priority
from gateway.proxy.inner_answer import ANSWER_BYTES, InnerAnswer
from gateway.secret import Secret, bearer_line

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
# Answers beyond this size are received one at a time, so that memory is bounded.
_LARGE_BYTES = 1024 * 1024
_MAX_IDLE_STREAMS = 256
_BATCH_CLASS = b"%d" % PRIORITIES["batch"]


class _AnswerErrorFields(msgspec.Struct):
    code: str = ""


class _AnswerError(msgspec.Struct):
    error: _AnswerErrorFields


_ERROR = msgspec.json.Decoder(_AnswerError)


class LineReply(NamedTuple):
    """An answer. retry_after_s: the wait that it asks for; None: it names none."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None = None

    @property
    def error_code(self) -> str:
        """The code of an error in OpenAI's form; empty: there is none."""
        if self.status < 400:
            return ""
        try:
            return _ERROR.decode(self.body).error.code
        except DECODE_ERRORS:
            return ""


class LineClient:
    """Sends lines, in one event loop."""

    def __init__(self, connect: Callable[[], Awaitable[Streams]]) -> None:
        self._connect = connect
        self._kept_streams: deque[Streams] = deque()
        self._large_answers = asyncio.Lock()

    async def send(self, path: str, body: bytes, token: Secret | None) -> LineReply:
        """Send a request. token: None for a gateway without keys. Raises NotReady where the data
        plane takes no connection, OSError where there is no answer, UpstreamError for an answer
        that is too large or no HTTP."""
        while self._kept_streams:
            reader, writer = self._kept_streams.pop()
            if reader.at_eof() or writer.is_closing():
                writer.close()
                continue
            try:
                return await self._send((reader, writer), path, body, token)
            except _NoAnswerError:
                continue  # the other end closed the connection meanwhile
        try:
            streams = await self._connect()
        except OSError as error:
            raise NotReady(
                f"The data plane takes no connection: {short_reason(error)}.", hint="Try again."
            ) from None
        return await self._send(streams, path, body, token)

    async def _send(
        self, streams: Streams, path: str, body: bytes, token: Secret | None
    ) -> LineReply:
        reader, writer = streams
        answer = InnerAnswer(reader)
        is_complete = False
        try:
            writer.write(_head(path, len(body), token))
            writer.write(body)
            try:
                await answer.read_head()
            except ConnectionError as error:
                raise _NoAnswerError(str(error)) from None
            data = await self._read(answer)
            is_complete = True
        except httptools.HttpParserError:
            raise UpstreamError("The answer is not HTTP.", hint="Try again.") from None
        finally:
            if is_complete and len(self._kept_streams) < _MAX_IDLE_STREAMS and _is_kept(answer):
                self._kept_streams.append(streams)
            else:
                writer.transport.abort()
        return _line_reply(answer, data)

    async def _read(self, answer: InnerAnswer) -> bytes:
        """The whole body. Raises ConnectionError, UpstreamError."""
        pieces = list[bytes]()
        size = 0
        pieces_of_body = answer.pieces()
        async for piece in pieces_of_body:
            pieces.append(piece)
            size += len(piece)
            if size > _LARGE_BYTES:
                break
        if size > _LARGE_BYTES:
            async with self._large_answers:
                async for piece in pieces_of_body:
                    pieces.append(piece)
                    size += len(piece)
                    if size > ANSWER_BYTES:
                        raise UpstreamError(
                            f"The answer is over {ANSWER_BYTES:,} bytes.", hint="Ask for less."
                        )
        return b"".join(pieces)

    def close(self) -> None:
        """Close the connections that are kept."""
        while self._kept_streams:
            _, writer = self._kept_streams.pop()
            writer.transport.abort()


class _NoAnswerError(ConnectionError):
    """The connection ended before an answer began."""


def _head(path: str, length: int, token: Secret | None) -> bytes:
    # Equal heads but for the length: the data plane parses such a head once (`head_cache.py`).
    return (
        b"POST %b HTTP/1.1\r\nhost: localhost\r\n%b%b: %b\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n"
        % (path.encode(), bearer_line(token), priority.HEADER, _BATCH_CLASS, length)
    )


def _is_kept(answer: InnerAnswer) -> bool:
    return all(
        not (name == b"connection" and value.lower() == b"close") for name, value in answer.headers
    )


def _line_reply(answer: InnerAnswer, body: bytes) -> LineReply:
    headers = dict(answer.headers)
    retry_after = headers.get(b"retry-after", b"")
    return LineReply(
        answer.status,
        headers.get(b"x-request-id", b"").decode("latin-1"),
        body,
        float(retry_after) if retry_after.isdigit() else None,
    )
