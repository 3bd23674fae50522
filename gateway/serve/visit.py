"""One client's stay: runs the work for it, and ends the work when the client leaves, without losing a connection.

httpcore is not safe to cancel everywhere: between a made connection and its first byte, inside its own locks, and while it gives
a connection back, a cancelled request leaves a connection open that nobody reads or closes again. So the work is cancelled only
where it waits for bytes of the engine or of the client, which is where it spends its time. The rest takes one step of the event
loop, except connecting: a client that leaves then is answered for as soon as the connection is made or its time is up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from starlette.types import Message, Receive, Send

_WAITS = {
    "http11.send_request_headers",
    "http11.send_request_body",
    "http11.receive_response_headers",
    "http11.receive_response_body",
}


class Visit:
    """Give `trace` to httpx as the extension of that name, and `send` to whatever answers the client."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._waits = False
        self._over = False

    async def run(self, work: Coroutine[None, None, None]) -> None:
        """Runs `work` to its end, or until the client leaves. Raises what `work` raises; no task outlives this."""
        task = asyncio.create_task(work)
        gone = asyncio.create_task(self._gone())
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._over = True
            if self._waits:
                task.cancel()
            gone.cancel()
            await asyncio.wait((task, gone))
        if not task.cancelled():
            task.result()

    async def trace(self, event: str, _info: Mapping[str, Any]) -> None:
        """What httpcore is doing: `event` is a region of its code and `started`, `complete` or `failed`."""
        region, _, moment = event.rpartition(".")
        if region in _WAITS:
            self._waits = moment == "started"
            if self._waits and self._over:
                raise asyncio.CancelledError

    async def send(self, message: Message) -> None:
        """Sends to the client. The work may be cancelled here too: a client that reads slowly can block for long."""
        if self._over:
            raise asyncio.CancelledError
        before, self._waits = self._waits, True
        await self._send(message)
        self._waits = before

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
