"""The front over raw sockets: hostile bytes, limits, time-outs, pipelining, and FastAPI beside
it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import math
import socket
import struct
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.proxy import client_connection
from gateway.proxy import limits as guard
from gateway.proxy.access.auth import Keys
from gateway.proxy.asgi_request import PIECE_BYTES
from gateway.proxy.client_connection import ClientConnection
from gateway.proxy.routing.route_table import RouteTable
from gateway.proxy.upload import Upload
from gateway.proxy.workers.sockets import bind_shared_sockets
from gateway.secret import Secret
from gateway.server.server import listen
from gateway.settings import Settings
from tests.support.dataplane import (
    ASK,
    CHAT,
    DONE,
    LIMIT,
    Gateway,
    Hog,
    answers,
    connect_without_reading,
    event,
    http_client,
    local,
    model,
    never_answers,
    raw_request,
    reads_on,
    refused_url,
    stage,
    until,
)
from tests.support.patience import HANG_S, hang_s
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

BODY = json.dumps(ASK).encode()
GOOD = raw_request(BODY)


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with Gateway(stands_still=True) as running:
        yield running


async def talk(port: int, data: bytes) -> bytes:
    """Sends `data`; everything that comes back until the gateway closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), HANG_S)
    finally:
        writer.close()


async def status(reader: asyncio.StreamReader) -> bytes:
    """The status and the beginning of the next answer, which has a content-length."""
    async with asyncio.timeout(hang_s()):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return (
            head.split(b"\r\n")[0].removeprefix(b"HTTP/1.1 ")
            + b" | "
            + (await reader.readexactly(length))[:24]
        )


async def statuses(port: int, data: bytes, count: int) -> list[bytes]:
    """Those of the next `count` answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    lines = [await status(reader) for _ in range(count)]
    writer.close()
    return lines


def post(
    *headers: bytes, body: bytes = BODY, path: bytes = CHAT.encode(), length: bool = True
) -> bytes:
    lines = [b"POST %b HTTP/1.1" % path, *headers]
    if length:
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join([*lines, b"", body])


# --- bytes that are not a request, or two ---


@pytest.mark.parametrize("path", [CHAT.encode(), b"/echo"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([b"host: x", b"transfer-encoding: chunked"], 400),
        ([b"host: x", b"content-length: 3"], 400),
        ([b"host: x", b"transfer-encoding: xchunked"], 400),
        ([b"host: x", b"transfer-encoding: chunked, identity"], 400),
        ([b"host: x", b"x : y"], 400),
        ([b"host : x"], 400),
        ([b"host: x", b"x: a\0b"], 400),
        ([b"host: x\n", b"x: y"], 400),
        ([b"host: x", b"x: y", b" folded"], 400),
        ([b"host: x", b": y"], 400),
        ([], 400),
        ([b"host:"], 400),
        ([b"host: x/evil?a="], 400),
        ([b"host: x#"], 400),
        ([b"host: x@y"], 400),
        ([b"host: a b"], 400),
        ([b"host: [::1"], 400),
        ([b"host: x:123456"], 400),
        ([b"host: x", b"host: y"], 400),
        ([b"host: x", b"content_type: application/json"], 400),
        ([b"host: x", b"a: " + b"b" * guard.HEAD_BYTES], 431),
        ([b"host: x", *[b"a%d: b" % n for n in range(5000)]], 431),
        ([b"host: x", *[b"a:"] * guard.HEADER_LINES], 431),
        ([b"host: x", b"authorization: Bearer a", b"authorization: Bearer b"], 400),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_an_unreadable_request_is_refused_and_reaches_nobody(
    gateway: Gateway, path: bytes, headers: list[bytes], status: int
) -> None:
    async with stage(gateway, answers) as [upstream]:
        answer = await talk(gateway.port, post(*headers, path=path))
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert answer.count(b"x-gateway-source: gateway\r\n") == 1
        assert b"connection: close\r\n" in answer
        assert set(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]) == {
            "message",
            "type",
            "param",
            "code",
        }
        assert upstream.requests == []


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\nhost: x\n\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100,
        b"SSH-2.0-x\r\n",
        b"POST /v1/chat/completions HTTP/2.0\r\nhost: x\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1 x\r\nhost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
        post(b"host: x", b"content-length: -1", length=False),
        post(b"host: x", b"content-length: +4", length=False),
        post(b"host: x", b"content-length: 4, 4", length=False),
        post(b"host: x", b"content-length: 99999999999999999999", length=False),
        post(
            b"host: x", b"transfer-encoding: chunked", length=False, body=b"-1\r\n{}\r\n0\r\n\r\n"
        ),
        post(
            b"host: x",
            b"transfer-encoding: chunked",
            length=False,
            body=b"2;a=\0\r\n{}\r\n0\r\n\r\n",
        ),
        post(
            b"host: x", b"transfer-encoding: chunked", length=False, body=b"2\r\n{}x\r\n0\r\n\r\n"
        ),
        post(
            b"host: x",
            b"transfer-encoding: chunked",
            length=False,
            body=b"ffffffffffffffffff\r\n{}",
        ),
        post(b"host: x", b"transfer-encoding: chunked", length=False, body=b"2\n{}\n0\n\n"),
    ],
    ids=lambda value: repr(value)[:50],
)
async def test_bytes_that_are_no_request_are_a_bad_request(gateway: Gateway, data: bytes) -> None:
    async with stage(gateway, answers) as [upstream]:
        answer = await talk(gateway.port, data)
        assert answer[:13] in (b"HTTP/1.1 400 ", b"HTTP/1.1 413 ")
        assert answer.count(b"x-gateway-source: gateway\r\n") == 1
        assert upstream.requests == []


@pytest.mark.parametrize("path", [CHAT, "/echo"])
async def test_a_head_without_an_end_is_not_kept(gateway: Gateway, path: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\nx: ".encode())
    for _ in range(40):
        writer.write(b"a" * 100_000)
    answer = await asyncio.wait_for(reader.read(), HANG_S)
    assert answer.startswith(b"HTTP/1.1 431 ")
    writer.transport.abort()  # much of it is not sent yet
    gateway.later(guard.LINGER_S + 1)
    await until(lambda: not gateway.plane.connections)


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://x/v1/chat/completions", b"200"),
        (b"/v1/chat%2Fcompletions", b"200"),
        (b"/v1/chat/completions?x=/admin", b"200"),
        (b"/v1/chat/completions#x", b"200"),
        (b"/v1/chat/completions;x", b"404"),
        (b"/v1/chat/completions/", b"404"),
        (b"/v1//chat/completions", b"404"),
        (b"/v1/../sleep", b"404"),
        (b"/v1/sleep", b"404"),
        (b"/v1/%73leep", b"404"),
        (b"/V1/chat/completions", b"200 OK | /V1/chat/completions"),
        (b"//v1/chat/completions", b"200 OK | //v1/chat/completion"),
        (b"/sleep", b"200 OK | /sleep"),
    ],
)
async def test_only_paths_of_the_table_reach_an_engine(
    gateway: Gateway, target: bytes, status: bytes
) -> None:
    async with stage(gateway, answers) as [upstream]:
        data = post(b"host: x", b"connection: close", path=target)
        answer = await talk(gateway.port, data)
        line, _, rest = answer.partition(b"\r\n")
        line_and_body = line.removeprefix(b"HTTP/1.1 ") + b" | " + rest.partition(b"\r\n\r\n")[2]
        assert line_and_body.startswith(status)
        assert [call.head[0] for call in upstream.calls] == (
            [b"POST /v1/chat/completions HTTP/1.1"] if status == b"200" else []
        )


async def test_many_lines_are_refused_before_more_of_them_are_parsed(gateway: Gateway) -> None:
    lines = b"a:\r\n" * (guard.HEADER_LINES + 2)
    chunked = post(b"host: x", b"transfer-encoding: chunked", length=False, body=b"0\r\n")
    for data, expected_status in ((b"GET / HTTP/1.1\r\n", b"431"), (chunked, b"400")):
        # Bytes after the last allowed line could be no request, but are not read.
        assert (await talk(gateway.port, data + lines + b"\0\r\n"))[9:12] == expected_status


async def test_a_head_may_have_all_allowed_lines(gateway: Gateway) -> None:
    async with stage(gateway, answers):
        allowed_lines = [b"a: b"] * (guard.HEADER_LINES - 3)
        data = post(b"host: x", b"connection: close", *allowed_lines)
        assert (await talk(gateway.port, data)).startswith(b"HTTP/1.1 200 ")


# --- long reads, which other clients would wait for ---

TINY_CHUNKS = b"1\r\na\r\n" * 20_000


@contextlib.contextmanager
def record_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[ClientConnection, int]]]:
    """The connection and the bytes of each read, in order."""
    connection_reads: list[tuple[ClientConnection, int]] = []
    update = ClientConnection.buffer_updated

    def record_read(connection: ClientConnection, count: int) -> None:
        connection_reads.append((connection, count))
        update(connection, count)

    with monkeypatch.context() as patch:
        patch.setattr(ClientConnection, "buffer_updated", record_read)
        yield connection_reads


def test_other_clients_are_read_between_two_reads_of_a_long_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long_request = post(b"host: x", b"transfer-encoding: chunked", length=False, body=TINY_CHUNKS)
    short_request = raw_request(BODY, "/echo")
    with record_reads(monkeypatch) as connection_reads, Gateway() as gateway:
        address = ("127.0.0.1", gateway.port)
        with (
            socket.create_connection(address) as sender,
            socket.create_connection(address) as client,
        ):
            client.settimeout(hang_s())
            client.sendall(short_request)
            assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
            ((short_connection, _),) = connection_reads
            connection_reads.clear()
            with gateway.stopped_loop():
                sender.setblocking(False)
                assert sender.send(long_request) > 2 * guard.READ_BYTES
                client.sendall(short_request)
            assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
            gateway.catch_up()
            connections = [connection for connection, _ in connection_reads]
            assert connections.index(short_connection) <= 1
            assert max(count for _, count in connection_reads) <= guard.READ_BYTES


async def test_a_sized_body_is_read_in_large_pieces_that_end_with_it(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps({**ASK, "user": "x" * 2**20}).encode()
    with record_reads(monkeypatch) as connection_reads:
        async with stage(gateway, answers) as [upstream]:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(raw_request(body) + raw_request(BODY) * 2)
            lines = [await status(reader) for _ in range(3)]
            assert [line[:6] for line in lines] == [b"200 OK"] * 3
            assert sum(len(call.requests) for call in upstream.calls) == 3
            writer.close()
    assert max(count for _, count in connection_reads) > guard.READ_BYTES


# --- requests in a row ---


async def test_requests_sent_ahead_are_answered_in_turn_by_any_replica(
    gateway: Gateway,
) -> None:
    async def script(call: Call) -> None:
        if b"slow" in call.body:
            await asyncio.sleep(0.2)
        await call.reply(b"engine " + call.body[-8:])

    slow = raw_request(b'{"model":"m","user":"slow"}')
    echo = b"GET /echo HTTP/1.1\r\nhost: x\r\n\r\n"
    async with stage(gateway, script) as [upstream]:
        lines = await statuses(gateway.port, slow + echo + GOOD + echo + slow, 5)
        assert [line[9:15] for line in lines] == [
            b"engine",
            b"/echo ",
            b"engine",
            b"/echo ",
            b"engine",
        ]
        assert [b"slow" in request for request in upstream.requests] == [True, False, True]


async def test_a_request_behind_one_that_is_being_answered_comes_in_pieces(
    gateway: Gateway,
) -> None:
    async with stage(gateway, answers):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        for byte in GOOD + GOOD:
            writer.write(bytes([byte]))
            await writer.drain()
        for _ in range(2):
            assert await asyncio.wait_for(reader.readline(), HANG_S) == b"HTTP/1.1 200 OK\r\n"
            await reader.readuntil(b'"stop"}]}')
        writer.close()


async def test_garbage_behind_a_good_request_is_refused_after_the_answer(gateway: Gateway) -> None:
    async def script(call: Call) -> None:
        await asyncio.sleep(0.1)
        await call.reply(b"{}")

    async with stage(gateway, script) as [upstream]:
        for bad in (
            b"NONSENSE\r\n\r\n",
            b"GET /x HTTP/1.1\r\n\r\n",
            post(b"host: x", b"transfer-encoding: chunked"),
        ):
            answer = await talk(gateway.port, GOOD + bad)
            first, _, second = answer.partition(b"{}")
            assert first.startswith(b"HTTP/1.1 200 OK")
            assert second.startswith(b"HTTP/1.1 400 ")
        assert len(upstream.requests) == 3


async def test_the_number_of_pipelined_requests_is_limited(gateway: Gateway) -> None:
    async with stage(gateway, answers) as [upstream]:
        answer = await talk(gateway.port, GOOD * 100)
        assert answer.count(b"HTTP/1.1 200 OK") == guard.MAX_PIPELINED_REQUESTS + 1
        assert answer.count(b"HTTP/1.1 400 ") == 1
        assert len(upstream.requests) == guard.MAX_PIPELINED_REQUESTS + 1


async def test_a_client_that_leaves_takes_all_it_sent_ahead_with_it(gateway: Gateway) -> None:
    async with stage(gateway, never_answers) as [upstream]:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(GOOD * 3)
        await until(lambda: len(upstream.requests) == 1)
        writer.transport.abort()
        await until(lambda: gateway.routes.total_in_flight == 0)
        assert len(upstream.requests) == 1


async def test_a_client_that_waits_for_a_go_ahead_gets_it(gateway: Gateway) -> None:
    async with stage(gateway, answers):
        for path in CHAT, "/echo":
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            head, _, body = raw_request(BODY, path).partition(b"\r\n\r\n")
            writer.write(head + b"\r\nexpect: 100-continue\r\n\r\n")
            assert (
                await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HANG_S)
                == b"HTTP/1.1 100 Continue\r\n\r\n"
            )
            writer.write(body)
            assert await asyncio.wait_for(reader.readline(), HANG_S) == b"HTTP/1.1 200 OK\r\n"
            writer.close()


@pytest.mark.parametrize("path", [CHAT, "/echo"])
async def test_a_client_of_http_1_0_gets_no_interim_answer(gateway: Gateway, path: str) -> None:
    async with stage(gateway, answers):
        head, _, body = raw_request(BODY, path).partition(b"\r\n\r\n")
        head = head.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\nexpect: 100-continue\r\n\r\n"
        answer = await talk(gateway.port, head + body)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("path", [CHAT, "/echo"])
async def test_white_space_behind_a_header_is_no_part_of_its_value(
    gateway: Gateway, path: str
) -> None:
    async with stage(gateway, answers):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        head, _, body = raw_request(BODY, path).partition(b"\r\n\r\n")
        lines = head + b"\r\nexpect: 100-continue"
        writer.write(lines.replace(b"\r\n", b" \t\r\n").replace(b" \t", b"", 1) + b"\t\r\n\r\n")
        assert await asyncio.wait_for(reader.readline(), HANG_S) == b"HTTP/1.1 100 Continue\r\n"
        writer.write(body)
        await asyncio.wait_for(reader.readline(), HANG_S)
        assert await asyncio.wait_for(reader.readline(), HANG_S) == b"HTTP/1.1 200 OK\r\n"
        writer.close()


async def test_a_client_of_http_1_0_gets_no_chunks_and_the_end_is_the_end(gateway: Gateway) -> None:
    async def script(call: Call) -> None:
        await call.start()
        await call.chunk(event("a") + DONE)
        await call.end()

    async with stage(gateway, script):
        answer = await talk(gateway.port, GOOD.replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert body == event("a") + DONE


async def test_an_upgrade_that_nobody_speaks_is_ignored(gateway: Gateway) -> None:
    """As Java's HTTP client asks for it, in every request."""
    ask = post(
        b"host: x",
        b"connection: Upgrade, HTTP2-Settings",
        b"upgrade: h2c",
        b"http2-settings: AAEAAEAAAAIAAAAB",
    )
    async with stage(gateway, answers) as [upstream]:
        for data in (ask, GOOD), (ask[:-40], ask[-40:]), (ask + GOOD, b""), (ask[:20], ask[20:]):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            for piece in data:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.02)
            assert await asyncio.wait_for(reader.readline(), HANG_S) == b"HTTP/1.1 200 OK\r\n"
            writer.close()
        assert {call.body for call in upstream.calls} == {BODY}
    async with http_client(gateway) as client:
        response = await client.post(
            "/echo", content=b"abc", headers={"connection": "upgrade", "upgrade": "h2c"}
        )
        assert response.content == b"/echo abc"


# --- limits ---


async def test_connections_beyond_the_limit_are_asked_to_retry() -> None:
    for total, limit in (3, 9), (9, 3):
        with Gateway(connections=total, connections_per_address=limit) as gateway:
            gateway.route(model(refused_url()))
            connections = [
                await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(3)
            ]
            await until(lambda gateway=gateway: len(gateway.plane.connections) == 3)  # type: ignore[misc]
            answer = await talk(gateway.port, b"")
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1\r\n" in answer
            for _, writer in connections:
                writer.close()
            await until(lambda gateway=gateway: not gateway.plane.connections)  # type: ignore[misc]
            assert (await statuses(gateway.port, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n", 1))[
                0
            ].startswith(b"200")


async def test_a_refused_client_keeps_nobody_else_out() -> None:
    """Those beyond the limit of their address hear it while their client lingers; they take no
    place of the others."""
    with Gateway(connections=6, connections_per_address=2) as gateway:
        gateway.route(model(refused_url()))
        crowd = [
            await asyncio.open_connection("127.0.0.1", gateway.port, local_addr=("127.0.0.2", 0))
            for _ in range(30)
        ]
        await until(lambda: gateway.plane.connection_limiter._refused_count > 0)
        for _ in range(3):
            assert (await statuses(gateway.port, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n", 1))[
                0
            ].startswith(b"200")
        for _, writer in crowd:
            writer.close()


async def only_connection(gateway: Gateway) -> ClientConnection:
    """The gateway's end of its one connection."""
    await until(lambda: len(gateway.plane.connections) == 1)
    [front] = gateway.plane.connections
    assert isinstance(front, ClientConnection)
    return front


@pytest.mark.parametrize("path", [CHAT, "/echo"])
async def test_each_phase_of_a_connection_has_its_deadline(gateway: Gateway, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n".encode()
    async with stage(gateway, answers) as [upstream]:
        for data, seconds, begins in (
            (b"", guard.FIRST_BYTE_S, b""),
            (b"P", guard.HEAD_S, b"HTTP/1.1 408 "),
            (head[:-2], guard.HEAD_S, b"HTTP/1.1 408 "),
            (head + b"{", guard.BODY_S, b"HTTP/1.1 408 "),
        ):
            await until(lambda: not gateway.plane.connections)
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(data)
            front = await only_connection(gateway)
            await until(lambda front=front, data=data: front._reader._received_bytes == len(data))  # type: ignore[misc]
            gateway.later(seconds - 1)
            assert front in gateway.plane.connections
            assert not front.is_discarding
            gateway.later(2)
            assert (await asyncio.wait_for(reader.read(), HANG_S))[:13] == begins
            writer.close()
        assert upstream.requests == []


async def test_a_head_that_dribbles_in_has_no_more_time_than_any_other(gateway: Gateway) -> None:
    await until(lambda: not gateway.plane.connections)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    front = await only_connection(gateway)
    for count, byte in enumerate(GOOD[:60], 1):
        writer.write(bytes([byte]))
        await until(lambda count=count: front._reader._received_bytes == count)  # type: ignore[misc]
        gateway.later(1)
        assert front.is_discarding == (count >= guard.HEAD_S)
        if front.is_discarding:
            break
    assert (await asyncio.wait_for(reader.read(), HANG_S)).startswith(b"HTTP/1.1 408 ")
    writer.close()


@pytest.mark.parametrize("path", ["/v1/models", "/echo"])
async def test_a_connection_is_kept_for_a_while(path: str) -> None:
    with Gateway(keep_alive_s=75, stands_still=True) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        front = await only_connection(gateway)
        for _ in range(2):
            writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            assert (await status(reader)).startswith(b"200 OK ")
            await until(lambda: front.deadline < math.inf and not front._is_busy())
            gateway.later(74)
            assert front in gateway.plane.connections
        gateway.later(2)
        assert await asyncio.wait_for(reader.read(), HANG_S) == b""
        writer.close()


async def test_a_client_that_takes_nothing_is_cut_off(gateway: Gateway) -> None:
    async def script(call: Call) -> None:
        await call.start()
        while True:
            await call.chunk(b"data: " + b"x" * 100_000 + b"\n\n")

    async with stage(gateway, script) as [upstream]:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
        writer.write(GOOD)
        front = await only_connection(gateway)
        await until(lambda: not reads_on(front))
        gateway.later(guard.STALL_S - 1)
        assert front in gateway.plane.connections

        def is_cut() -> bool:
            # Bytes that were on their way at the last look count as taken.
            gateway.later(guard.STALL_S + 1)
            return upstream.calls[0].closed.is_set()

        await until(is_cut)
        writer.transport.abort()


@pytest.mark.parametrize("connection", [b"close", b"keep-alive"])
async def test_a_client_that_takes_all_but_the_end_is_cut_off_too(connection: bytes) -> None:
    """The rest is so little that the transport asks for no pause; it waits with closing until the
    client has taken it."""
    with Gateway(stands_still=True) as gateway:

        async def script(call: Call) -> None:
            front, byte_count = await only_connection(gateway), 0
            await call.start("text/plain")
            while not front.transport.get_write_buffer_size():
                await call.chunk(b"x" * 8192)
                byte_count += 8192
                await until(
                    lambda sent=byte_count: (
                        front.exchange is not None and front.exchange.sent_bytes == sent
                    )  # type: ignore[misc]
                )
            await call.end()

        async with stage(gateway, script):
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
            writer.write(post(b"host: x", b"connection: " + connection))
            front = await only_connection(gateway)
            await until(lambda: front.server_state.total_requests == 1)
            assert not front.is_write_paused or front.transport.is_closing()
            gateway.later(gateway.plane.keep_alive_s + 1)
            assert front in gateway.plane.connections

            def is_cut() -> bool:
                gateway.later(guard.STALL_S + 1)
                return front not in gateway.plane.connections

            await until(is_cut)
            writer.transport.abort()


def test_bytes_that_a_client_never_took_are_not_kept_by_the_kernel_either() -> None:
    class Transport:
        """As much of one as is looked at."""

        def get_extra_info(self, _: str) -> socket.socket:
            return server_side

        def get_write_buffer_size(self) -> int:
            return 0

    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        server_side, _ = server.accept()
        server_side.setblocking(False)
        written_bytes = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                written_bytes += server_side.send(bytes(2**20))
        stall, now = guard.ClientProgress(Transport(), 0.0), 0.0  # type: ignore[arg-type]
        while not stall.is_over(now):
            now += guard.STALL_S + 1
        server_side.close()
        received_bytes = 0
        with pytest.raises(ConnectionResetError):
            while piece := client.recv(2**20):
                received_bytes += len(piece)
        assert received_bytes < written_bytes


def test_the_kernel_buffers_little_for_a_slow_client(tmp_path: Path) -> None:
    lone_listener = listen(Settings(port=0, data_dir=tmp_path))
    for listener in (
        lone_listener,
        *bind_shared_sockets(listen(Settings(port=0, data_dir=tmp_path)), 2),
    ):
        with listener:
            listener.listen()
            assert (
                listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
                == guard.UNSENT_BYTES
            )
    with socket.create_server(("127.0.0.1", 0)) as server:
        guard.limit_send_buffer(server)
        with socket.create_connection(server.getsockname()) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            server_side, _ = server.accept()
            with server_side:
                server_side.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while True:
                        server_side.send(bytes(1024))
                queue_bytes = struct.unpack(
                    "i", fcntl.ioctl(server_side.fileno(), termios.TIOCOUTQ, bytes(4))
                )[0]
                assert queue_bytes < 4 * guard.UNSENT_BYTES


async def test_a_body_for_fastapi_has_the_same_limit() -> None:
    with Gateway(body_bytes=1024) as gateway:
        for data in (
            raw_request(b"{", "/echo", length=10**12),
            b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n800\r\n"
            + b" " * 0x800,
        ):
            answer = await talk(gateway.port, data)
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert b"body_too_large" in answer


async def test_fastapi_gets_its_requests_whole(gateway: Gateway) -> None:
    async with http_client(gateway) as client:
        for _ in range(3):
            response = await client.post("/admin/x?a=b", content=b"0123456789" * 100_000)
            assert response.headers["x-asgi"] == "1"
            assert response.content == b"/admin/x " + b"0123456789" * 100_000


# --- callers ---


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 401),
        ([b"authorization: Bearer wrong"], 401),
        ([b"authorization: Basic api-secret"], 401),
        ([b"authorization: Bearer api-secret"], 200),
        ([b"authorization: Bearer admin-secret"], 200),
        ([b"x-api-key: api-secret"], 200),
        ([b"x-api-key: wrong"], 401),
        ([b"x-api-key: api-secret", b"authorization: Bearer wrong"], 401),
    ],
)
async def test_inference_needs_a_key(headers: list[bytes], status: int) -> None:
    with Gateway(keys=Keys(Secret("admin-secret"), Secret("api-secret"))) as gateway:
        async with stage(gateway, answers) as [upstream]:
            answer = await talk(gateway.port, post(b"host: x", b"connection: close", *headers))
            assert answer.startswith(b"HTTP/1.1 %d " % status)
            assert len(upstream.requests) == (status == 200)
            for path in (b"/v1/models", b"/v1/nothing"):
                answer = await talk(
                    gateway.port, b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % path
                )
                assert answer.startswith(b"HTTP/1.1 401 ")


async def test_only_this_machines_own_programs_come_in_without_keys() -> None:
    with Gateway(keys=Keys(None, None)) as gateway:
        async with stage(gateway, answers):
            for host, origin, status in (
                (b"localhost", b"", 200),
                (b"evil.example", b"", 403),
                (b"localhost", b"http://evil", 403),
            ):
                headers = [
                    b"host: " + host,
                    b"connection: close",
                    *([b"origin: " + origin] if origin else []),
                ]
                assert (await talk(gateway.port, post(*headers))).startswith(
                    b"HTTP/1.1 %d " % status
                )


def read_to_end(*_: object) -> bytes:
    raise MemoryError


async def test_a_client_that_sends_a_whole_body_before_it_reads_hears_that_there_is_no_memory(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither to copy the read that brings the head and a part of the body, nor for the body.
    monkeypatch.setattr(client_connection, "bytes", read_to_end, raising=False)
    monkeypatch.setattr(Upload, "more", read_to_end)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    async with asyncio.timeout(hang_s()):
        writer.transport.set_write_buffer_limits(0)
        writer.write(post(b"host: x", body=b"x" * 8_000_000))
        await writer.drain()
        assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
    writer.close()


async def test_a_request_is_answered_where_there_is_no_memory_to_remember_its_head(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_connection, "bytes", read_to_end, raising=False)
    async with stage(gateway, answers):
        assert [statuse[:3] for statuse in await statuses(gateway.port, GOOD, 1)] == [b"200"]


async def test_a_refused_body_is_not_waited_for() -> None:
    with Gateway(keys=Keys(Secret("admin-secret"), None), stands_still=True) as closed_gateway:
        answer = await talk(closed_gateway.port, raw_request(b"{", length=1_000_000))
        assert answer.startswith(b"HTTP/1.1 401 ")
        await closed_gateway.wait_until_settled()


# --- slow and unfinished bodies ---


async def refuse_key(scope: Any, receive: Any, send: Any) -> None:
    """Stands for FastAPI behind a key: answers before it reads anything."""
    await send(
        {"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]}
    )
    await send({"type": "http.response.body", "body": b"no"})


LENGTH = b"content-length: 9000000"
CHUNKED = b"transfer-encoding: chunked"


@pytest.mark.parametrize("path", [CHAT, "/echo"])
@pytest.mark.parametrize(("framing", "piece"), [(LENGTH, b"a"), (CHUNKED, b"1\r\na\r\n")])
async def test_a_body_that_trickles_has_no_more_time_than_one_that_stops(
    gateway: Gateway, path: str, framing: bytes, piece: bytes
) -> None:
    await until(lambda: not gateway.plane.connections)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n" % (path.encode(), framing) + piece)
    front = await only_connection(gateway)
    seconds = 0
    for count in range(1, 10):
        await until(lambda count=count: front._reader._size == count)  # type: ignore[misc]
        gateway.later(9)
        seconds += 9
        assert front.is_discarding == (seconds > guard.BODY_S)
        if front.is_discarding:
            break
        writer.write(piece)
    assert (await asyncio.wait_for(reader.read(), HANG_S)).startswith(b"HTTP/1.1 408 ")
    writer.close()


@pytest.mark.parametrize(("framing", "piece"), [(LENGTH, b"a"), (CHUNKED, b"1\r\na\r\n")])
@pytest.mark.parametrize("path", [CHAT, "/admin/models"])
async def test_a_refused_body_that_trickles_holds_its_place_for_a_moment(
    path: str, framing: bytes, piece: bytes
) -> None:
    with Gateway(
        keys=Keys(Secret("admin-secret"), None), app=refuse_key, stands_still=True
    ) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(
            b"POST %b HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n" % (path.encode(), framing) + piece
        )
        front = await only_connection(gateway)
        async with asyncio.timeout(hang_s()):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert b"connection: close\r\n" in answer
        for _ in range(int(guard.LINGER_S) - 1):
            writer.write(piece)
            gateway.later(1)
            assert front in gateway.plane.connections
        gateway.later(1)
        await until(lambda: not gateway.plane.connections)
        writer.close()


async def test_a_refused_client_cannot_send_for_ever() -> None:
    """Chunks and trailers have no announced end: unread bytes fill the kernel's buffers, and then
    nothing is taken."""
    with Gateway(app=refuse_key, stands_still=True) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n")
        front = await only_connection(gateway)
        assert (await asyncio.wait_for(reader.readline(), HANG_S))[9:12] == b"401"
        writer.write(b"a: b\r\n" * 4_000_000)
        await until(lambda: not front.transport.is_reading())
        gateway.later(guard.LINGER_S + 1)
        await until(lambda: not gateway.plane.connections)
        writer.transport.abort()


async def test_a_client_that_is_still_sending_hears_the_answer_of_fastapi() -> None:
    with Gateway(app=refuse_key) as gateway:
        for close in (b"", b"connection: close\r\n"):
            answer = await talk(
                gateway.port,
                b"POST /x HTTP/1.1\r\nhost: x\r\n"
                + close
                + b"content-length: 9000000\r\n\r\n"
                + bytes(8_000_000),
            )
            assert answer.startswith(b"HTTP/1.1 401 ")
            assert answer.endswith(b"\r\n\r\nno")
        # A body that came whole costs the connection nothing.
        ask = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc"
        assert await statuses(gateway.port, ask + ask, 2) == [b"401 Unauthorized | no"] * 2


async def test_requests_sent_ahead_stay_in_the_kernel_until_their_turn(gateway: Gateway) -> None:
    event = asyncio.Event()

    async def script(call: Call) -> None:
        await event.wait()
        await call.reply(b"{}")

    large = json.dumps({**ASK, "user": "x" * 2**20}).encode()
    async with stage(gateway, script) as [upstream]:
        await until(lambda: not gateway.plane.connections)
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(GOOD + raw_request(large) * 14 + raw_request(large, "/echo"))
        front = await only_connection(gateway)
        await until(lambda: front.is_reading_paused)
        gateway.later(10 * guard.BODY_S)  # unread bytes have no time either
        assert front in gateway.plane.connections
        assert not front.is_discarding
        assert len(front._turns) == 1
        assert gateway.plane.body_budget.used_bytes < len(large) / 2
        event.set()
        for _ in range(15):
            assert (await status(reader)).startswith(b"200 OK | {}")
        assert (await status(reader)).startswith(b"200 OK | /echo ")
        writer.close()
        assert [len(request) > 2**20 for request in upstream.requests] == [False] + [True] * 14
    assert gateway.plane.body_budget.used_bytes == 0


async def test_bodies_that_trickle_make_room_for_one_that_waits() -> None:
    with Gateway(stands_still=True) as gateway:
        budget = gateway.plane.body_budget
        count = budget.size // 2**21 + 1
        async with stage(gateway, answers) as [upstream]:
            trickling = [
                await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(count)
            ]
            for _, writer in trickling:
                writer.write(raw_request(b"A" * 2**20, length=LIMIT))
            await until(lambda: 2 * budget.used_bytes > budget.size)
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(raw_request(json.dumps({**ASK, "user": "B" * 2**21}).encode()))
            await until(lambda: budget._waiting_count > 0)
            small = await statuses(gateway.port, GOOD, 1)
            assert small[0].startswith(b"200 OK")
            answer = asyncio.create_task(reader.readline())
            for _ in range(20):
                if (await asyncio.wait((answer,), timeout=0.2))[0]:
                    break
                for _, attacker in trickling:
                    attacker.write(b"A")
                gateway.later(1)
            assert await answer == b"HTTP/1.1 200 OK\r\n"
            assert len(upstream.requests) == 2
            for _, client_writer in (*trickling, (reader, writer)):
                client_writer.transport.abort()
        await until(lambda: budget.used_bytes == 0)


async def test_a_body_that_waits_for_room_is_not_timed_and_goes_on_when_there_is_some() -> None:
    with Gateway(stands_still=True) as gateway:
        budget = gateway.plane.body_budget
        hog = Hog()
        budget.add(hog, budget.size)
        async with stage(gateway, answers):
            data = raw_request(b'{"x":"' + b"y" * 300_000, length=2**20)
            first, second = [
                await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(2)
            ]
            first[1].write(data)
            await until(lambda: len(budget._growing) == 1)
            second[1].write(data)
            await until(lambda: budget._waiting_count == 1)
            gateway.later(1)
            gateway.later(guard.BODY_S + 1)
            assert (await asyncio.wait_for(first[0].readline(), HANG_S)).startswith(
                b"HTTP/1.1 408 "
            )
            # The second request goes beyond the free memory in place of the first.
            await until(lambda: budget._waiting_count == 0)
            for _, writer in (first, second):
                writer.transport.abort()
        budget.release(hog)
        await until(lambda: budget.used_bytes == 0)


async def test_many_connections_that_bring_one_read_each_are_told_to_come_back() -> None:
    with Gateway(stands_still=True) as gateway:
        budget = gateway.plane.body_budget
        hog = Hog()
        budget.add(hog, 2 * budget.size)
        async with stage(gateway, answers):
            answer = await talk(gateway.port, raw_request(b'{"x":"' + b"y" * 300_000, length=2**20))
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 5\r\n" in answer
        budget.release(hog)
        assert budget.used_bytes == 0


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/echo", "/v1/nothing"])
async def test_a_large_body_is_counted_no_longer_after_any_end(gateway: Gateway, path: str) -> None:
    body = json.dumps({"model": "nobody", "x": "y" * 3_000_000}).encode()
    for data in raw_request(body, path), raw_request(body, path).replace(b"POST", b"GET", 1):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(data)
        assert await asyncio.wait_for(reader.readline(), HANG_S)
        await until(lambda: gateway.plane.body_budget.used_bytes == 0)
        writer.transport.abort()
    assert not gateway.plane.body_budget._shares


async def test_a_flood_of_connections_is_not_answered_one_by_one() -> None:
    with Gateway(connections=2) as gateway:
        gateway.route(model(refused_url()))
        connections = [
            await asyncio.open_connection("127.0.0.1", gateway.port)
            for _ in range(2 + guard.refusal_capacity(2))
        ]
        await until(lambda: len(gateway.plane.connections) == 2 + guard.refusal_capacity(2))
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), HANG_S) == b""
        for _, client_writer in (*connections, (reader, writer)):
            client_writer.transport.abort()


async def test_unread_lists_ahead_hold_a_piece_of_one_list() -> None:
    """Not all lists that one read asked for, nor one whole list. All come to a client that
    reads."""
    async with Upstream(answers) as upstream, local(upstream.url) as (plane, port):
        names = [f"{'m' * 90}{number}" for number in range(5000)]
        plane.routes.table = RouteTable({name: model(upstream.url, name=name) for name in names})
        reader, writer = await connect_without_reading(port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * 8)
        await until(lambda: bool(plane.connections))
        (front,) = plane.connections
        await until(lambda: front.is_write_paused)
        for _ in range(100):
            await asyncio.sleep(0)
        assert front.pipelined_count >= 3  # the kernel takes some megabytes
        assert front.transport.get_write_buffer_size() <= 4 * PIECE_BYTES
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        bodies = []
        async with asyncio.timeout(hang_s()):
            for _ in range(8):
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length: ")[2].split()[0])
                bodies.append(await reader.readexactly(size))
        assert len(json.loads(bodies[0])["data"]) == len(names)
        assert set(bodies) == {bodies[0]}
        writer.close()
        await writer.wait_closed()


LONG_LIST = b"x" * 1_600_000


async def long_list(_scope: Any, receive: Any, send: Any) -> None:
    """An application whose every answer is as long as the list of 2,000 models."""
    await receive()
    length = [(b"content-length", b"%d" % len(LONG_LIST))]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": LONG_LIST})


@pytest.mark.parametrize("path", ["/v1/models", "/admin/models"])
async def test_all_requests_of_a_full_pipeline_are_answered_from_bounded_bytes(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request of a full pipeline is refused, and an unread one holds some pieces of a list."""
    monkeypatch.setattr("tests.support.dataplane.echo", long_list)
    async with Upstream(answers) as upstream, local(upstream.url) as (plane, port):
        names = [f"{'m' * 90}{number}" for number in range(3000)]
        plane.routes.table = RouteTable({name: model(upstream.url, name=name) for name in names})
        reader, writer = await connect_without_reading(port)
        count = guard.MAX_PIPELINED_REQUESTS + 1
        writer.write(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode() * count)
        await until(lambda: any(connection.is_write_paused for connection in plane.connections))
        (front,) = plane.connections
        assert isinstance(front, ClientConnection)
        most = 0
        for _ in range(1000):
            await asyncio.sleep(0)
            most = max(most, front.transport.get_write_buffer_size())
        assert front.pipelined_count <= guard.MAX_PIPELINED_REQUESTS
        assert not front.transport.is_reading()
        assert 0 < most <= 4 * PIECE_BYTES
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        async with asyncio.timeout(hang_s()):
            for _ in range(count):
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200"), head
                size = int(head.lower().partition(b"content-length: ")[2].split()[0])
                assert size > PIECE_BYTES
                await reader.readexactly(size)
                most = max(most, front.transport.get_write_buffer_size())
        assert most <= 4 * PIECE_BYTES
        writer.close()
        await writer.wait_closed()


async def test_a_client_that_takes_no_answer_asks_nothing_more() -> None:
    """Kept answers are bounded. Its requests are answered once it reads, up to the request that was
    too far ahead."""
    async with Upstream(answers) as upstream, local(upstream.url) as (plane, port):
        reader, writer = await connect_without_reading(port)
        request_count = 0
        request = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
        front: ClientConnection | None = None
        while front is None or not front.is_write_paused:
            writer.write(request * 10)
            request_count += 10
            await asyncio.sleep(0)
            front = front or next(
                (
                    connection
                    for connection in plane.connections
                    if isinstance(connection, ClientConnection)
                ),
                None,
            )
            if front is not None:
                front.transport.set_write_buffer_limits(high=4096)
        assert not front.transport.is_reading()
        buffer_size = front.transport.get_write_buffer_size()
        assert buffer_size <= 4 * PIECE_BYTES
        writer.write(request * 1000)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert front.transport.get_write_buffer_size() <= buffer_size
        assert front.pipelined_count <= guard.MAX_PIPELINED_REQUESTS
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        async with asyncio.timeout(hang_s()):
            for number in range(request_count + 1000):
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(
                    int(head.lower().partition(b"content-length: ")[2].split()[0])
                )
                if not head.startswith(b"HTTP/1.1 200"):
                    # The kernel gave more than may wait in one piece, and no answer was taken.
                    assert b"Too many requests wait on this connection" in body
                    assert number > 100
                    assert await reader.read() == b""
                    break
        writer.close()
        await writer.wait_closed()
