"""An engine that logs the raw bytes it gets, and what of them no gateway may write."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from dataclasses import dataclass, field

HEAD = re.compile(rb"POST (/[\w/.-]+) HTTP/1\.1\r\n((?:[A-Za-z-]+: [\x20-\x7e]*\r\n)+)\r\n")
ALLOWED = {
    b"host",
    b"content-type",
    b"content-length",
    b"accept",
    b"accept-encoding",
    b"x-request-id",
    b"traceparent",
    b"tracestate",
    b"user-agent",
    b"connection",
}
REPEATED = {b"accept", b"traceparent", b"tracestate"}
BODY = json.dumps({"id": "c1", "object": "chat.completion", "created": 1, "model": "m", "choices": []}).encode()
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)
EVENTS = b"data: {}\n\ndata: [DONE]\n\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (
    len(EVENTS),
    EVENTS,
)
MODELS = b"GET /v1/models HTTP/1.1\r\n"


@dataclass
class LoggedEngine:
    """Answers for one model. `asked` are whole requests, raw; `wrong` what no gateway may write, with the bytes."""

    model: str
    asked: list[bytes] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    url: str = ""

    async def __aenter__(self) -> LoggedEngine:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=64 * 2**20)
        self.url = "http://127.0.0.1:{1}/v1".format(*self._server.sockets[0].getsockname())
        listing = json.dumps({"object": "list", "data": [{"id": self.model, "object": "model"}]}).encode()
        self._listing = (
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(listing) + listing
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            while head := await self._head(reader):
                if head.startswith(MODELS):
                    writer.write(self._listing)
                    continue
                length = self._length(head)
                if length is None:
                    break
                try:
                    body = await reader.readexactly(length)
                except asyncio.IncompleteReadError:
                    break  # the client left, and the gateway with it: allowed
                self._look_at(head, body)
                writer.write(STREAM if b'"stream":true' in body else ANSWER)
        with contextlib.suppress(ConnectionError):
            writer.close()

    async def _head(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                self.wrong.append(f"an unfinished head: {error.partial!r}")
            return b""

    def _length(self, head: bytes) -> int | None:
        found = HEAD.fullmatch(head)
        if not found:
            self.wrong.append(f"a head that is not written by us: {head!r}")
            return None
        lines = [line.partition(b": ") for line in found[2].split(b"\r\n") if line]
        names = [name.lower() for name, _, _ in lines]
        lengths = [value for name, _, value in lines if name.lower() == b"content-length"]
        once = [name for name in names if name not in REPEATED]
        if set(names) - ALLOWED or len(set(once)) != len(once) or len(lengths) != 1 or not lengths[0].isdigit():
            self.wrong.append(f"headers that are not ours: {head!r}")
            return None
        return int(lengths[0])

    def _look_at(self, head: bytes, body: bytes) -> None:
        self.asked.append(head + body)
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            return  # the engine says so itself
        if not isinstance(fields, dict) or fields.get("model") != self.model:
            self.wrong.append(f"a body for another model: {head + body!r}")
