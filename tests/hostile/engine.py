"""An engine that logs the raw bytes it gets, and those that no gateway may write."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import zlib
from dataclasses import dataclass, field
from typing import Self

from tests.hostile.forms import model_read_by_starlette

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
    b"via",
    b"user-agent",
    b"connection",
}
# Only the count of our own name passes on from a client's words there.
VIA = re.compile(rb"1\.1 fitserve(?:, 1\.1 fitserve)*")
REPEATED = {b"accept", b"traceparent", b"tracestate"}
BODY = b'{"id": "c-%08x", "object": "chat.completion", "created": 1, "model": "m", "choices": []}'
EVENTS = b"data: {}\n\ndata: [DONE]\n\n"
STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding:"
    b" chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(EVENTS), EVENTS)
)
FORM = re.compile(rb"\r\ncontent-type: (multipart/form-data[^\r\n]*)")
MODELS = b"GET /v1/models HTTP/1.1\r\n"


def answer_to(body: bytes) -> bytes:
    """The body of the answer: no two requests get the same."""
    return BODY % zlib.crc32(body)


def whole_answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )


@dataclass
class LoggedEngine:
    """Answers for one model.

    questions: whole requests, raw.
    wrong: names of things that no gateway may write, with the bytes.
    """

    model: str
    questions: list[bytes] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    url: str = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=64 * 2**20)
        self.url = "http://127.0.0.1:{1}/v1".format(*self._server.sockets[0].getsockname())
        self._listing = whole_answer(
            json.dumps({"object": "list", "data": [{"id": self.model, "object": "model"}]}).encode()
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
                await self._look_at(head, body)
                if not await self._answer(writer, body):
                    break
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
        match = HEAD.fullmatch(head)
        if not match:
            self.wrong.append(f"a head that is not written by us: {head!r}")
            return None
        lines = [line.partition(b": ") for line in match[2].split(b"\r\n") if line]
        names = [name.lower() for name, _, _ in lines]
        lengths = [value for name, _, value in lines if name.lower() == b"content-length"]
        unique_names = [name for name in names if name not in REPEATED]
        passed_by = all(VIA.fullmatch(value) for name, _, value in lines if name.lower() == b"via")
        if (
            set(names) - ALLOWED
            or len(set(unique_names)) != len(unique_names)
            or len(lengths) != 1
            or not lengths[0].isdigit()
            or not passed_by
        ):
            self.wrong.append(f"headers that are not ours: {head!r}")
            return None
        return int(lengths[0])

    async def _answer(self, writer: asyncio.StreamWriter, body: bytes) -> bool:
        """Whether the connection lives on."""
        writer.write(STREAM if b'"stream":true' in body else whole_answer(answer_to(body)))
        return True

    async def _look_at(self, head: bytes, body: bytes) -> None:
        self.questions.append(head + body)
        if form := FORM.search(head):
            readable, model = await model_read_by_starlette(form[1], body)
            if readable and model != self.model:
                self.wrong.append(f"a form that Starlette reads as for {model!r}: {head + body!r}")
            return
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            return  # the engine says so itself
        if not isinstance(fields, dict) or fields.get("model") != self.model:
            self.wrong.append(f"a body for another model: {head + body!r}")
