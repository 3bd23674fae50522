"""Forwarding of requests that are not inference from a worker to the control process.

Pieces pass in both directions over a Unix socket as they come, so a followed log streams. A client
that leaves ends the request in the control process too. The control process checks the key. A
header has the client's address, which is trusted because only workers can reach the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from pathlib import Path

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import NotReady
from gateway.proxy.api.protocol import request_id, send_error
from gateway.proxy.workers.sockets import short_path

_ADDRESS = b"x-fitserve-client"
# Headers of one connection, rewritten on the next.
_CONNECTION_HEADERS = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"expect",
        b"date",
        b"server",
        _ADDRESS,
    }
)
_PIECE_BYTES = 64 * 1024


class ControlForwarder:
    """The application of a worker: forwards every request."""

    def __init__(self, control: Path) -> None:
        self._path = short_path(control)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError:
            await send_error(send, _no_control_process_error(), request_id(scope))
            return
        control_call = asyncio.create_task(_send_request(scope, receive, writer))
        try:
            if not await _answer(scope, reader, send):
                await send_error(send, _no_control_process_error(), request_id(scope))
        finally:
            control_call.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await control_call
            writer.transport.abort()


def _no_control_process_error() -> NotReady:
    return NotReady(
        "The control process of the gateway does not answer; models are still served.",
        hint="Start the gateway again; its log has the cause.",
        retry_after_s=5,
    )


async def _send_request(scope: Scope, receive: Receive, writer: asyncio.StreamWriter) -> None:
    """Write the request, then end the connection when the client leaves.

    No `connection: close` is sent: an answer before the end of the body would be lost.
    """
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    names = {name for name, _ in headers}
    is_chunked = b"transfer-encoding" in names
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    added = [(_ADDRESS, scope["client"][0].encode())] if scope.get("client") else []
    added += [(b"transfer-encoding", b"chunked")] if is_chunked else []
    lines = _lines(
        (*((name, value) for name, value in headers if name not in _CONNECTION_HEADERS), *added)
    )
    writer.write(b"%b %b HTTP/1.1\r\n%b\r\n" % (scope["method"].encode(), target, lines))
    while (message := await receive())["type"] == "http.request":
        if data := message.get("body", b""):
            writer.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)
        if is_chunked and not message.get("more_body", False):
            writer.write(b"0\r\n\r\n")
            is_chunked = False
        await writer.drain()
    writer.transport.abort()


def _lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join(b"%b: %b\r\n" % pair for pair in headers)


async def _answer(scope: Scope, reader: asyncio.StreamReader, send: Send) -> bool:
    """Pass the answer on. Returns whether there was one. If the answer breaks off, uvicorn closes
    the client's connection, because the application ends early."""
    answer = _ForwardedAnswer(is_head_only=scope["method"] == "HEAD")
    with contextlib.suppress(OSError):
        while not answer.is_complete and (data := await reader.read(_PIECE_BYTES)):
            answer.parser.feed_data(data)
            for message in answer.messages:
                await send(message)
            answer.messages.clear()
    return answer.has_started


class _ForwardedAnswer:
    """Handler of httptools' calls. `messages`: for the client, in order."""

    def __init__(self, *, is_head_only: bool) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.messages: list[Message] = []
        self.has_started = self.is_complete = False
        self._head_only = is_head_only
        self._headers: list[tuple[bytes, bytes]] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name not in _CONNECTION_HEADERS:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self.parser.get_status_code()
        self.has_started = True
        self.messages.append(
            {"type": "http.response.start", "status": status, "headers": self._headers}
        )
        if self._head_only:
            self.on_message_complete()

    def on_body(self, data: bytes) -> None:
        self.messages.append({"type": "http.response.body", "body": data, "more_body": True})

    def on_message_complete(self) -> None:
        if not self.is_complete:
            self.is_complete = True
            self.messages.append({"type": "http.response.body", "body": b"", "more_body": False})


class ForwardedAddress:
    """Wraps the application of the control process: takes the client's address from the header of a
    forwarded request."""

    def __init__(self, inner_app: ASGIApp) -> None:
        self._inner_app = inner_app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            address = next(
                (value.decode() for name, value in scope["headers"] if name == _ADDRESS), None
            )
            headers = [pair for pair in scope["headers"] if pair[0] != _ADDRESS]
            scope = {**scope, "headers": headers, "client": (address, 0) if address else None}
        await self._inner_app(scope, receive, send)
