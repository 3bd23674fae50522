"""Long answers of Docker, a log or a pull, read from its socket on the event loop.

The SDK would read them in threads that wait for hours and cannot be cancelled. Here the end of the
generator closes the connection. Back-pressure is the socket's own: data is read only after earlier
data was consumed. Requests are HTTP/1.0, so that the body is plain bytes until the connection
closes.
"""

from __future__ import annotations

import asyncio
import calendar
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from gateway.domain.units import GIB, TransferProgress
from gateway.hosts.host import MAX_LINE

CHUNK = 64 * 1024


class DockerRefusalError(Exception):
    """Docker answered with an error status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@asynccontextmanager
async def conversation(
    path: str, request: str, *, headers: str = "", head_s: float
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """An accepted `request` ("GET /x"): the body of its answer, and the input of an attached
    container.

    Raises DockerRefusalError, and OSError: TimeoutError after `head_s` without a status line.
    """
    async with asyncio.timeout(head_s):
        reader, writer = await asyncio.open_unix_connection(path, limit=CHUNK)
    try:
        async with asyncio.timeout(head_s):
            writer.write(f"{request} HTTP/1.0\r\nHost: docker\r\n{headers}\r\n".encode())
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
                raise ConnectionError("Docker closed the connection") from error
            status = int(head.split(b" ", 2)[1])
            if status != 200:
                raise DockerRefusalError(status, _refusal_reason(await reader.read()))
        yield reader, writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def stream(
    path: str, request: str, *, headers: str = "", head_s: float, silence_s: float | None = None
) -> AsyncGenerator[bytes, None]:
    """The body of the answer to `request`, as it comes. Close it (`aclosing`) to leave early.

    Raises the errors of `conversation`, and TimeoutError after `silence_s` without a byte.
    """
    async with conversation(path, request, headers=headers, head_s=head_s) as (reader, _):
        while True:
            async with asyncio.timeout(silence_s):
                chunk = await reader.read(CHUNK)
            if not chunk:
                return
            yield chunk


def _refusal_reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip()


def whole_frames(frames: bytearray) -> Iterator[tuple[int, bytes]]:
    """Take the complete frames out of Docker's multiplexed stream: stream and payload.

    A frame has 8 bytes of header (stream, size). Stream 2 is standard error.
    """
    at = 0
    while (body := at + 8) <= len(frames):
        end = body + int.from_bytes(frames[at + 4 : body], "big")
        if end > len(frames):
            break
        yield frames[at], bytes(frames[body:end])
        at = end
    del frames[:at]


class LogLines:
    """The lines of Docker's multiplexed log with timestamps, over any number of requests.

    Each frame holds one entry: a timestamp, a blank, then a line with its newline, or 16 KiB of a
    longer one. After a break, request from `resume`: repeated entries are skipped.
    """

    def __init__(self) -> None:
        self._frames = bytearray()
        self._pending: dict[int, bytearray] = {}
        self._last = b""
        self._sent_stamp = b""

    def resume(self) -> str:
        """Begin an answer from its start. Returns the `since` (Unix seconds) to ask for."""
        self._frames.clear()
        self._sent_stamp = self._last
        if not self._last:
            return "0"
        whole_seconds = self._last[:19].decode()
        fraction = self._last[20:-1].decode()
        return f"{calendar.timegm(time.strptime(whole_seconds, '%Y-%m-%dT%H:%M:%S'))}.{fraction}"

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The lines that `chunk` completes."""
        self._frames += chunk
        for source, entry in whole_frames(self._frames):
            stamp, _, text = entry.partition(b" ")
            # Timestamps have a fixed width, so they compare as text.
            if stamp <= self._sent_stamp:
                continue
            self._last = max(self._last, stamp)
            pending = self._pending.setdefault(source, bytearray())
            pending += text.removesuffix(b"\n")[: MAX_LINE - len(pending)]
            if text.endswith(b"\n"):
                del self._pending[source]
                yield bytes(pending)

    def rest(self) -> Iterator[bytes]:
        """The last lines, which no newline ended."""
        yield from (bytes(line) for line in self._pending.values() if line)
        self._pending.clear()


class PullProgress:
    """The progress of a pull in words, from its events (one JSON object per line)."""

    def __init__(self, image: str) -> None:
        self._image = image
        self._line = b""
        self._bytes_by_layer: dict[str, int] = {}
        self._total: dict[str, int] = {}
        self._unknown_layers: set[str] = set()
        self.error: str | None = None

    def feed(self, chunk: bytes) -> None:
        *lines, self._line = (self._line + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                self._event(json.loads(line))

    def _event(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = str(event["error"])
        layer = event.get("id", "")
        status = event.get("status", "")
        detail = event.get("progressDetail") or {}
        if status in ("Pulling fs layer", "Waiting"):
            self._unknown_layers.add(layer)
        elif status == "Downloading":
            self._unknown_layers.discard(layer)
            self._bytes_by_layer[layer] = detail.get("current", 0)
            self._total[layer] = max(detail.get("total", 0), self._bytes_by_layer[layer])
        elif status in (
            "Verifying Checksum",
            "Download complete",
            "Extracting",
            "Pull complete",
            "Already exists",
        ):
            self._unknown_layers.discard(layer)
            self._bytes_by_layer[layer] = self._total.get(layer, 0)

    def __str__(self) -> str:
        return self.describe()

    def describe(self) -> str:
        """The progress with its figures, where they are known."""
        done_bytes = sum(self._bytes_by_layer.values())
        total = sum(self._total.values())
        if not total:
            return f"pulling {self._image}"
        if done_bytes == total and not self._unknown_layers:
            return f"unpacking {self._image}: {_gib_of_text(total)} GiB"
        # Docker reports the size of a layer when its download begins, a few at a time.
        parts = (
            f"pulling {self._image}: {_gib_of_text(done_bytes)} of"
            f" {'more than ' if self._unknown_layers else ''}{_gib_of_text(total)} GiB"
        )
        return parts if self._unknown_layers else TransferProgress(parts, done_bytes, total)


def _gib_of_text(size: int) -> str:
    return f"{size / GIB:.1f}"
