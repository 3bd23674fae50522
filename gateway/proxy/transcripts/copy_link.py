"""The connection to the keeper of transcripts. It never waits: copies beyond a bound are dropped.

The keeper may be absent for a time, as while it is restarted. Copies wait for it in memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from pathlib import Path

from gateway.errors import short_reason
from gateway.proxy.workers.sockets import short_path

log = logging.getLogger(__name__)

# Bytes of copies that wait for the keeper, in one process.
MAX_WAITING_BYTES = 32 * 1024 * 1024
_RETRY_S = 0.5
_FLUSH_S = 2.0
_LOOK_S = 0.01


class CopyLink(asyncio.Protocol):
    """Sends copies, in one event loop.

    dropped_count: copies that found no room.
    """

    def __init__(self, path: Path) -> None:
        self.dropped_count = 0
        self._path = path
        self._socket_name = ""  # each short name takes a descriptor
        self._waiting_frames: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._is_closed = False

    def send(self, frame: bytes) -> None:
        """Send a copy soon, or drop it."""
        if self.unsent_bytes + len(frame) > MAX_WAITING_BYTES or self._is_closed:
            self.dropped_count += 1
        elif self._transport is not None:
            self._transport.write(frame)
        else:
            self._waiting_frames.append(frame)
            self._waiting_bytes += len(frame)
            self.connect()

    @property
    def unsent_bytes(self) -> int:
        transport = self._transport
        return self._waiting_bytes + (transport.get_write_buffer_size() if transport else 0)

    def connect(self) -> None:
        """Connect soon, and again after each loss."""
        if self._connecting is None and not self._is_closed:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def close(self) -> None:
        """Send the waiting copies, for a short time, then end."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _FLUSH_S
        while self.unsent_bytes and loop.time() < deadline:  # noqa: ASYNC110 - a buffer's size
            await asyncio.sleep(_LOOK_S)
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        frames = tuple(self._waiting_frames)
        self._waiting_frames.clear()
        self._waiting_bytes = 0
        transport.writelines(frames)  # type: ignore[attr-defined]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        self.connect()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        was_reported = False
        while not self._is_closed:
            try:
                self._socket_name = self._socket_name or short_path(self._path)
                await loop.create_unix_connection(lambda: self, self._socket_name)
                break
            except OSError as error:
                if not was_reported:
                    log.warning("the keeper of transcripts is away: %s", short_reason(error))
                was_reported = True
            await asyncio.sleep(_RETRY_S)
        self._connecting = None
