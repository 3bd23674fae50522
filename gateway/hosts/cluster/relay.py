"""The actor of a machine: passes calls to the socket of its node service, and nothing more.

The relay knows no call and has no state but open connections, so it may die and restart at any
time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os

SOCKET_VARIABLE = "FITSERVE_NODE_SOCKET"
"""Names the node service's socket in the environment of a machine's raylet."""
_MAX_BYTES = 256 * 1024


class Relay:
    def __init__(self) -> None:
        self._path = os.environ[SOCKET_VARIABLE]
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def call(self, line: bytes) -> tuple[int, bytes]:
        """Send a call. Returns the number of its connection (0: none) and the answer's begin."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError as error:
            return 0, absence_line(f"Its node service does not answer: {error.strerror or error}.")
        number = next(self._numbers)
        self._open[number] = reader, writer
        writer.write(line)
        try:
            await writer.drain()
        except OSError:
            await self.close(number)
            return 0, absence_line("Its node service broke off.")
        return number, await self.read(number)

    async def read(self, number: int) -> bytes:
        """The next bytes of the answer; none at its end."""
        if number not in self._open:
            return b""
        try:
            chunk = await self._open[number][0].read(_MAX_BYTES)
        except OSError:
            chunk = b""
        if not chunk:
            await self.close(number)
        return chunk

    async def close(self, number: int) -> None:
        """Give the call up."""
        if (streams := self._open.pop(number, None)) is not None:
            streams[1].transport.abort()


def absence_line(reason: str) -> bytes:
    """The line of an answer that says why a machine does not answer."""
    hint = "Run `fitserve cluster status`."
    failure = {"answer": "failed", "error": "AgentAway", "message": reason, "hint": hint}
    return json.dumps(failure).encode() + b"\n"
