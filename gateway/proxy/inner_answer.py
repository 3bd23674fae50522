"""The answer to a request that the gateway makes to its own data plane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httptools

from gateway.errors import UpstreamError

_READ_BYTES = 64 * 1024
# Most bytes of an event, which has a token or at most a whole text, and of an answer that is read
# whole, such as vectors.
LINE_BYTES = 4 * 1024 * 1024
ANSWER_BYTES = 64 * 1024 * 1024


class InnerAnswer:
    """The answer: status, headers, and the pieces of its body."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._has_head = self._is_complete = False

    # --- called by the parser ---

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_head = True

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        # A provisional answer such as 100 is followed by the real one.
        self._is_complete = self.status >= 200

    async def read_head(self) -> None:
        """Read to the end of the head. Raises ConnectionError."""
        while not self._has_head or self.status < 200:
            await self._read_answer()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The pieces of the body. Raises ConnectionError where the answer is cut off."""
        while True:
            pieces = self._pieces
            self._pieces = []
            for piece in pieces:
                yield piece
            if self._is_complete:
                return
            await self._read_answer()

    async def lines(self) -> AsyncIterator[bytes]:
        """The whole lines of the body. Raises ConnectionError, UpstreamError."""
        line = list[bytes]()
        size = 0
        async for piece in self.pieces():
            first_part, *next_parts = piece.split(b"\n")
            line.append(first_part)
            size += len(first_part)
            for part in next_parts:
                yield b"".join(line)
                line = [part]
                size = len(part)
            if size > LINE_BYTES:
                raise _size_error("A line of the engine's answer", LINE_BYTES)

    async def body(self) -> bytes:
        """The whole body. Raises ConnectionError, UpstreamError."""
        pieces = list[bytes]()
        size = 0
        async for piece in self.pieces():
            pieces.append(piece)
            size += len(piece)
            if size > ANSWER_BYTES:
                raise _size_error("The engine's answer", ANSWER_BYTES)
        return b"".join(pieces)

    async def _read_answer(self) -> None:
        data = await self._reader.read(_READ_BYTES)
        if not data:
            raise ConnectionResetError("the answer was cut off")
        self._parser.feed_data(data)


def _size_error(subject: str, limit: int) -> UpstreamError:
    return UpstreamError(
        f"{subject} is over {limit:,} bytes.", hint="Ask for less, or use /v1, which has no bound."
    )
