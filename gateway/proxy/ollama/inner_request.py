"""A request of /v1 that the gateway makes to itself, over a pair of sockets in its own process.

The request is read by a `ClientConnection` like any other, so keys, limits, the queue, loading of
models and counts are those of /v1.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from gateway.proxy.inner_answer import InnerAnswer
from gateway.proxy.inner_connection import open_inner

if TYPE_CHECKING:
    from gateway.proxy.client_connection import ClientConnection

# Header lines of the caller that belong to the caller's own connection.
_CONNECTION_HEADERS = frozenset(
    {
        b"connection",
        b"content-length",
        b"content-type",
        b"expect",
        b"keep-alive",
        b"accept-encoding",
        b"transfer-encoding",
        b"upgrade",
        b"te",
        b"trailer",
        b"accept",
    }
)


@asynccontextmanager
async def inner_request(
    caller: ClientConnection,
    method: str,
    path: str,
    headers: Iterable[tuple[bytes, bytes]],
    body: bytes,
) -> AsyncIterator[InnerAnswer]:
    """The answer to a request for the caller's connection, with the head read. headers: of the
    caller's request. Raises ConnectionError, and OSError where no socket is to be had."""
    reader, writer, inner_connection = await open_inner(caller.inner_connection)
    try:
        writer.write(_request_head(method, path, headers, len(body)))
        writer.write(body)
        answer = InnerAnswer(reader)
        await answer.read_head()
        yield answer
    finally:
        writer.close()
        inner_connection.transport.close()


def _request_head(
    method: str, path: str, headers: Iterable[tuple[bytes, bytes]], length: int
) -> bytes:
    lines = [b"%s %s HTTP/1.1" % (method.encode(), path.encode())]
    lines += [
        b"%s: %s" % (name, value) for name, value in headers if name not in _CONNECTION_HEADERS
    ]
    lines += [b"content-type: application/json", b"content-length: %d" % length] if length else []
    return b"\r\n".join([*lines, b"connection: close", b"", b""])
