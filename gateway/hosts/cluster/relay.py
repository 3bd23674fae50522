"""The actor of a machine: passes calls to the socket of its node service, and nothing more.

The relay knows no call and has no state but open connections, so it may die and restart at any
time. A call may be fed with the answer of another machine to another call, from relay to relay.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
from typing import Any, NamedTuple

SOCKET_VARIABLE = "FITSERVE_NODE_SOCKET"
"""Names the node service's socket in the environment of a machine's raylet."""
# Answers with the bytes of files are long. A connection holds twice as much.
_MAX_BYTES = 2 * 1024 * 1024


class _Connection(NamedTuple):
    """An open call. feed: passes the answer of another machine to the call."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    feed: asyncio.Future[None] | None


class CallClosures:
    """Closes calls that were given up before their numbers came."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self, relay: Any, call: Any) -> None:
        """Close the connection of a call to a relay, as soon as the call has a number."""
        task = asyncio.ensure_future(_close(relay, call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _close(relay: Any, call: Any) -> None:
    # A relay without an answer has no connection.
    with contextlib.suppress(Exception):
        number, _ = await call
        if number:
            await relay.close.remote(number)


class Relay:
    def __init__(self) -> None:
        self._path = os.environ[SOCKET_VARIABLE]
        self._numbers = itertools.count(1)
        self._open: dict[int, _Connection] = {}
        self._closures = CallClosures()

    async def call(
        self, line: bytes, source: Any = None, source_line: bytes = b""
    ) -> tuple[int, bytes]:
        """Send a call. Returns the number of its connection (0: none) and the answer's begin.

        source: the relay whose answer to `source_line` follows the call; None: none does.
        """
        try:
            reader, writer = await asyncio.open_unix_connection(self._path, limit=_MAX_BYTES)
        except OSError as error:
            return 0, absence_line(f"Its node service does not answer: {error.strerror or error}.")
        try:
            writer.write(line)
            await writer.drain()
        except OSError:
            writer.transport.abort()
            return 0, absence_line("Its node service broke off.")
        number = next(self._numbers)
        feed = (
            asyncio.ensure_future(_feed(writer, source, source_line, self._closures))
            if source is not None
            else None
        )
        self._open[number] = _Connection(reader, writer, feed)
        return number, await self.read(number)

    async def read(self, number: int) -> bytes:
        """The next bytes of the answer; none at its end."""
        if number not in self._open:
            return b""
        try:
            chunk = await self._open[number].reader.read(_MAX_BYTES)
        except OSError:
            chunk = b""
        if not chunk:
            await self.close(number)
        return chunk

    async def close(self, number: int) -> None:
        """Give the call up."""
        if (connection := self._open.pop(number, None)) is not None:
            connection.writer.transport.abort()
            if connection.feed is not None:
                connection.feed.cancel()


async def _feed(
    writer: asyncio.StreamWriter, source: Any, line: bytes, closures: CallClosures
) -> None:
    """Pass the answer of another machine on, as fast as the connection takes it."""
    call: Any = None
    number = 0
    try:
        call = source.call.remote(line)
        number, chunk = await call
        call = None
        while chunk:
            # The next bytes come while these are written.
            next_chunk = source.read.remote(number) if number else None
            writer.write(chunk)
            await writer.drain()
            chunk = await next_chunk if next_chunk is not None else b""
        number = 0
    except OSError:
        # The node service of this machine has left.
        pass
    except Exception as error:
        writer.write(absence_line(f"The other machine does not answer: {type(error).__name__}."))
    finally:
        if number:
            source.close.remote(number)
        elif call is not None:
            closures.close(source, call)


def absence_line(reason: str) -> bytes:
    """The line of an answer that says why a machine does not answer."""
    hint = "Run `fitserve cluster status`."
    failure = {"answer": "failed", "error": "AgentAway", "message": reason, "hint": hint}
    return json.dumps(failure).encode() + b"\n"
