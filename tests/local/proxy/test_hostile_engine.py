"""P8: an endless answer of an engine passes through a gateway without staying in it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.dataplane import raw_request
from tests.support.patience import HANG_S
from tests.support.served import serve_models
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

PIECE = b"x" * 2**20
MIB = 48


async def endless(call: Call) -> None:
    """A line of an event, or a plain body, of `MIB`; or a head."""
    if call.head[0].startswith(b"GET"):
        await call.reply(b'{"object":"list","data":[{"id":"m","object":"model"}]}')
    elif b'"head"' in call.body:
        await call.send(b"HTTP/1.1 200 OK\r\n")
        while not call.closed.is_set():
            await call.send(b"x: " + PIECE + b"\r\n")
    else:
        await call.start("text/event-stream" if b'"event"' in call.body else "application/json")
        await call.chunk(b"data: ")
        for _ in range(MIB):
            await call.chunk(PIECE)
        await call.chunk(b"\n\n")
        await call.end()


async def test_p8_a_line_or_a_head_without_end_takes_no_memory(tmp_path: Path) -> None:
    async with Upstream(endless) as upstream:
        running = serve_models(tmp_path, {"m": [f"{upstream.url}/v1"]})
        gateway = await asyncio.to_thread(running.__enter__)
        try:
            mib_before = gateway.resident_mib
            for kind, size in ((b"event", MIB), (b"plain", MIB), (b"head", 0)):
                reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
                request = raw_request(
                    b'{"model":"m","messages":[],"stream":%b,"kind":"%b"}' % (b"false", kind)
                )
                writer.write(request.replace(b"host: x", b"host: localhost\r\nconnection: close"))
                status = await asyncio.wait_for(reader.readline(), HANG_S)
                assert status == (
                    b"HTTP/1.1 200 OK\r\n" if size else b"HTTP/1.1 502 Bad Gateway\r\n"
                )
                byte_count = 0
                while piece := await asyncio.wait_for(reader.read(2**20), HANG_S):
                    byte_count += len(piece)
                assert byte_count >= size * 2**20
                assert gateway.resident_mib - mib_before < 16
                writer.close()
        finally:
            await asyncio.to_thread(running.__exit__, None, None, None)
