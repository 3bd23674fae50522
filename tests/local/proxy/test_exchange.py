"""Acts of engines and clients on requests under way: leaving, dying, talking nonsense, being slow,
being swapped."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest

from gateway.proxy.bodies.body_budget import SMALL_BYTES
from gateway.proxy.client_connection import ClientConnection
from gateway.proxy.data_plane import DataPlane
from gateway.proxy.exchange import Exchange
from gateway.proxy.meter import Meter, answer_usage
from tests.support.dataplane import (
    ASK,
    CHAT,
    DONE,
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
    stage,
    streams_for_ever,
    until,
)
from tests.support.patience import HANG_S, Clock
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

GOOD = raw_request(json.dumps(ASK).encode())


async def headers_only(call: Call) -> None:
    await call.start("application/json")
    await call.closed.wait()


async def open_many(
    gateway: Gateway, count: int, data: bytes = GOOD
) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    clients = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(count)]
    for _, writer in clients:
        writer.write(data)
    return clients


# --- clients that leave ---


@pytest.mark.parametrize("script", [never_answers, headers_only, streams_for_ever])
async def test_a_hundred_clients_that_leave_in_one_phase_are_all_noticed_by_the_engine(
    gateway: Gateway, script: Callable[[Call], Awaitable[None]]
) -> None:
    async with stage(gateway, script) as [upstream]:
        clients = await open_many(gateway, 100)
        await until(lambda: len(upstream.requests) == 100)
        if script is not never_answers:
            for reader, _ in clients:
                await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HANG_S)
        for _, writer in clients:
            writer.transport.abort()
        await until(lambda: all(call.closed.is_set() for call in upstream.calls))
        gateway.catch_up()
        assert gateway.routes.total_in_flight == 0


# --- engines that die or talk nonsense ---


async def test_a_killed_engine_ends_a_hundred_streams_with_an_error_each(gateway: Gateway) -> None:
    async with stage(gateway, streams_for_ever) as [upstream]:
        clients = await open_many(gateway, 100)
        for reader, _ in clients:
            await asyncio.wait_for(reader.readuntil(b"first"), HANG_S)
        for call in upstream.calls:
            call.close()
            call.closed.set()
        for reader, writer in clients:
            remaining_bytes = await asyncio.wait_for(reader.read(), HANG_S)
            assert b"engine_error" in remaining_bytes
            assert b"[DONE]" not in remaining_bytes
            assert remaining_bytes.endswith(b"0\r\n\r\n")
            writer.close()


@pytest.mark.parametrize(
    ("garbage", "starts"),
    [
        (b"transfer-encoding: chunked\r\n\r\nzz\r\nx", True),
        (b"transfer-encoding: chunked\r\n\r\n5\r\nabcdefgh\r\n", True),
        (b"transfer-encoding: chunked\r\n\r\nffffffffffffffffffff\r\n", True),
        (b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n", False),
        (b"content-length: 1\r\ncontent-length: 2\r\n\r\n", False),
        (b"transfer-encoding: xchunked\r\nx : y\r\n\r\n", False),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_an_engine_whose_framing_is_broken_is_not_believed(
    gateway: Gateway, garbage: bytes, starts: bool
) -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n" + garbage)
        await call.closed.wait()

    async with stage(gateway, script) as [upstream]:
        [(reader, writer)] = await open_many(gateway, 1)
        if not starts:
            assert (
                await asyncio.wait_for(reader.readline(), HANG_S) == b"HTTP/1.1 502 Bad Gateway\r\n"
            )
        else:
            assert b"engine_error" in await asyncio.wait_for(reader.read(), HANG_S)
        await asyncio.wait_for(upstream.calls[0].closed.wait(), HANG_S)
        writer.close()


@pytest.mark.parametrize(
    "after", [b"x", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nevil!", b"\r\n\r\n0\r\n\r\n"]
)
async def test_bytes_behind_the_answer_of_an_engine_reach_nobody(
    gateway: Gateway, after: bytes
) -> None:
    async def script(call: Call) -> None:
        if len(call.requests) == 1 and not spoilt:
            spoilt.append(call)
            await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}" + after)
        else:
            await call.reply(b"{}")

    spoilt: list[Call] = []
    async with stage(gateway, script) as [upstream], http_client(gateway) as client:
        for _ in range(4):
            assert (await client.post(CHAT, json=ASK)).content == b"{}"
        assert len(upstream.requests) == 4
        assert len(upstream.calls) == 2
        assert spoilt[0].closed.is_set()


async def test_an_engine_that_talks_unasked_loses_its_connection(gateway: Gateway) -> None:
    async with stage(gateway, answers) as [upstream], http_client(gateway) as client:
        await client.post(CHAT, json=ASK)
        await upstream.calls[0].send(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nevil!")
        await asyncio.wait_for(upstream.calls[0].closed.wait(), HANG_S)
        assert (await client.post(CHAT, json=ASK)).json()["id"] == "c1"


async def test_an_engine_that_asks_for_its_connection_to_be_closed_gets_that(
    gateway: Gateway,
) -> None:
    async def script(call: Call) -> None:
        await call.reply(b"{}", headers="connection: close\r\n")

    async with stage(gateway, script) as [upstream], http_client(gateway) as client:
        for _ in range(3):
            assert (await client.post(CHAT, json=ASK)).status_code == 200
        assert [len(call.requests) for call in upstream.calls] == [1, 1, 1]


async def test_an_answer_that_ends_with_the_connection_is_whole(gateway: Gateway) -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + whole)
        call.close()

    whole = event("a") + DONE
    async with stage(gateway, script), http_client(gateway) as client:
        assert (await client.post(CHAT, json=ASK)).content == whole


async def test_informational_heads_before_the_answer_are_passed_over(gateway: Gateway) -> None:
    async def script(call: Call) -> None:
        await call.send(
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\ncontent-type:"
            b" a/b\r\n\r\n"
        )
        await call.reply(b"{}")

    async with stage(gateway, script) as [upstream], http_client(gateway) as client:
        for _ in range(2):
            response = await client.post(CHAT, json=ASK)
            assert (response.status_code, response.content) == (200, b"{}")
            assert response.headers["content-type"] == "application/json"
        assert len(upstream.calls) == 1


async def test_an_idle_connection_that_the_engine_closed_is_not_used(gateway: Gateway) -> None:
    async def script(call: Call) -> None:
        await call.reply(b"{}")
        call.close()

    async with stage(gateway, script) as [upstream], http_client(gateway) as client:
        for turn in range(5):
            assert (await client.post(CHAT, json=ASK)).status_code == 200
            await until(
                lambda turn=turn: (  # type: ignore[misc]
                    len(upstream.calls) == turn + 1
                    and not gateway.plane.pool(upstream.url).connections
                )
            )


# --- slow ones ---


async def test_an_engine_that_drips_is_waited_for_and_a_silent_one_is_given_up() -> None:
    drop = asyncio.Semaphore(0)

    async def drips(call: Call) -> None:
        await call.start()
        for _ in range(6):
            await drop.acquire()
            await call.chunk(event("x"))
        await call.closed.wait()

    with Gateway(engine_silence_s=3600, stands_still=True) as gateway:
        async with stage(gateway, drips):
            [(reader, writer)] = await open_many(gateway, 1)
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HANG_S)
            for _ in range(6):
                gateway.later(3000)
                drop.release()
                await asyncio.wait_for(reader.readuntil(event("x")), HANG_S)
            gateway.later(1)  # it has been heard
            gateway.later(3599)
            assert gateway.routes.total_in_flight == 1
            gateway.later(2)
            assert b"engine_error" in await asyncio.wait_for(reader.read(), HANG_S)
            writer.close()


async def test_a_slow_engine_is_not_silent_and_new_requests_do_not_hide_silence(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measure of an engine's watcher (`Routes.silent_s`): one token in 50 s is a sign of life,
    a request is not."""
    clock, drop = Clock(), asyncio.Semaphore(0)
    monkeypatch.setattr("gateway.proxy.routing.routes.time", clock)

    async def drips(call: Call) -> None:
        if b"silent" in call.body:
            await call.closed.wait()
            return
        await call.start()
        for _ in range(5):
            await drop.acquire()
            await call.chunk(event("x"))
        await drop.acquire()
        await call.end()

    async with stage(gateway, drips) as [upstream]:
        [(reader, writer)] = await open_many(gateway, 1)
        await until(lambda: len(upstream.requests) == 1)
        for _ in range(5):
            clock.now += 50
            assert gateway.routes.silent_s("m-0") == 50
            drop.release()
            await asyncio.wait_for(reader.readuntil(event("x")), HANG_S)
            gateway.later(0)
            assert gateway.routes.silent_s("m-0") == 0
        drop.release()
        await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), HANG_S)
        gateway.catch_up()
        assert gateway.routes.silent_s("m-0") is None
        silent = [writer]
        for count in range(10):
            [(_, writer)] = await open_many(
                gateway, 1, raw_request(json.dumps({**ASK, "user": "silent"}).encode())
            )
            silent.append(writer)
            await until(lambda count=count: len(upstream.requests) == count + 2)  # type: ignore[misc]
            gateway.later(0)
            assert gateway.routes.silent_s("m-0") == 50 * count
            clock.now += 50
        for writer in silent:
            writer.transport.abort()


async def test_slow_readers_hold_little_memory_and_slow_nobody_else(gateway: Gateway) -> None:
    async def script(call: Call) -> None:
        if b"quick" in call.body:
            await answers(call)
            return
        await call.start()
        for _ in range(100):
            await call.chunk(b"data: " + b"x" * 100_000 + b"\n\n")
        await call.end()

    async with stage(gateway, script) as [upstream]:
        clients = await open_many(gateway, 50)
        await until(lambda: len(upstream.requests) == 50)
        # Bytes that a client does not take are not taken from the engine.
        await until(
            lambda: sum(not reads_on(front) for front in list(gateway.plane.connections)) == 50
        )
        buffer_sizes = [
            front.transport.get_write_buffer_size() for front in list(gateway.plane.connections)
        ]
        assert len(buffer_sizes) == 50
        assert max(buffer_sizes) <= 512 * 1024
        assert sum(buffer_sizes) <= 50 * 256 * 1024
        async with http_client(gateway) as client:
            assert (await client.post(CHAT, json={**ASK, "user": "quick"})).status_code == 200
        for _, writer in clients:
            writer.transport.abort()


@asynccontextmanager
async def full(
    *, ending: Callable[[Call], Awaitable[None]], ahead: bytes = b""
) -> AsyncIterator[tuple[DataPlane, Upstream]]:
    """A client that has been given a whole answer and reads none of it: the gateway may write no
    more to it. `then` plays all other requests;
    `ahead`: the bytes that the client sent with the first one."""
    plane_, fronts = list[DataPlane](), list[ClientConnection]()

    async def script(call: Call) -> None:
        if b"fills" not in call.body:
            await ending(call)
            return
        [front] = fronts[:] = list(plane_[0].connections)
        front.transport.set_write_buffer_limits(high=8192)
        await call.start()
        while not front.transport.get_write_buffer_size():
            await call.chunk(b"x" * 4096)
            await asyncio.sleep(0)
        # The body is one piece, so that no byte is left to come when the gateway finds out that the
        # client is full.
        await call.send(b"4000\r\n" + b"x" * 16384 + b"\r\n0\r\n\r\n")

    async with Upstream(script) as upstream, local(upstream.url) as (plane, port):
        plane_.append(plane)
        _reader, writer = await connect_without_reading(port)
        writer.write(raw_request(json.dumps({**ASK, "user": "fills"}).encode()) + ahead)
        await until(
            lambda: bool(fronts) and fronts[0].is_write_paused and not plane.routes.total_in_flight
        )
        yield plane, upstream
        writer.transport.abort()


async def test_an_engine_whose_answer_waits_for_its_client_answers_the_next_one() -> None:
    """The engine was not read while the client could take no more. Its connection is used again,
    and must be read then."""
    async with full(ending=answers) as (plane, upstream):
        async with httpx.AsyncClient(trust_env=False, timeout=HANG_S) as client:
            port = next(iter(plane.connections)).transport.get_extra_info("sockname")[1]
            assert (
                await client.post(f"http://127.0.0.1:{port}{CHAT}", json=ASK)
            ).status_code == 200
        assert [len(call.requests) for call in upstream.calls] == [2]


async def test_a_client_that_reads_nothing_cannot_ask_for_more_than_it_takes() -> None:
    """Its next request waits; those of other clients do not."""
    async with (
        full(ending=answers, ahead=GOOD) as (plane, upstream),
        httpx.AsyncClient(trust_env=False, timeout=HANG_S) as client,
    ):
        port = next(iter(plane.connections)).transport.get_extra_info("sockname")[1]
        for count in (2, 3):
            answer = await client.post(f"http://127.0.0.1:{port}{CHAT}", json=ASK)
            assert (answer.status_code, len(upstream.requests)) == (200, count)


# --- large bodies ---


async def test_large_bodies_share_the_room_there_is(gateway: Gateway) -> None:
    size = 8 * 1024 * 1024
    body = json.dumps({"messages": "y" * size, "model": "m"}).encode()

    async def script(call: Call) -> None:
        assert len(call.body) == len(body)
        await call.reply(b"{}")

    async with stage(gateway, script) as [upstream]:
        most = 0

        async def ask() -> None:
            nonlocal most
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(raw_request(body))
            assert await asyncio.wait_for(reader.readline(), HANG_S) == b"HTTP/1.1 200 OK\r\n"
            writer.close()

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, gateway.plane.body_budget.used_bytes)
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(ask() for _ in range(12)))
        watching.cancel()
        assert 0 < most <= 32 * 1024 * 1024
        assert len(upstream.requests) == 12
        assert gateway.plane.body_budget.used_bytes == 0


async def test_a_client_that_leaves_while_it_waits_for_room_makes_none_wait_for_it(
    gateway: Gateway,
) -> None:
    room = gateway.plane.body_budget
    async with stage(gateway, answers) as [upstream]:
        hog = Hog()
        room.add(hog, room.size)
        # Little of it is left unread: a client's end can be seen only when all before it fits the
        # kernel's buffers.
        data = raw_request(b'{"x":"' + b"y" * (SMALL_BYTES + 300_000), length=2**20)
        clients = await open_many(gateway, 3, data)
        await until(lambda: room._waiting_count == 2)  # the oldest may always go on
        for _, writer in clients:
            writer.transport.abort()
        await until(lambda: room._waiting_count == 0)
        room.release(hog)
        assert room.used_bytes == 0
        assert upstream.calls == []


async def test_an_engine_that_answers_before_the_body_is_complete_is_heard(
    gateway: Gateway,
) -> None:
    async def script(call: Call) -> None:
        await call.reply(b'{"error":1}', "400 Bad Request")

    async with stage(gateway, script), http_client(gateway) as client:
        response = await client.post(CHAT, json={**ASK, "x": "y" * 3_000_000})
        assert (response.status_code, response.json()["error"]["message"]) == (400, "1")


async def test_a_client_that_announces_more_than_it_sends_reaches_no_engine(
    gateway: Gateway,
) -> None:
    async with stage(gateway, answers) as [upstream]:
        [(reader, writer)] = await open_many(gateway, 1, raw_request(b"{}", length=1000))
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), HANG_S) == b""
        writer.close()
        assert upstream.calls == []


# --- a table that changes ---


async def test_replicas_swapped_under_load_lose_no_request(gateway: Gateway) -> None:
    stop = False
    statuses: list[int] = []

    async def client_of(gateway: Gateway) -> None:
        async with http_client(gateway) as client:
            while not stop:
                response = await client.post(CHAT, json=ASK)
                if response.status_code != 200:
                    statuses.append(response.status_code)

    async with Upstream(answers) as first_upstream:
        gateway.route(model(first_upstream.url, name="m"))
        clients = [asyncio.create_task(client_of(gateway)) for _ in range(10)]
        try:
            current, old = first_upstream, "m-0"
            for turn in range(5):
                follower = await Upstream(answers).__aenter__()
                route = model(follower.url)
                new = replace(route.replicas[0], id=f"m-0-a{turn}")
                gateway.route(replace(route, replicas=(new,)))
                await until(lambda follower=follower: len(follower.requests) > 20)  # type: ignore[misc]
                await until(lambda old=old: gateway.routes.in_flight(old) == 0)  # type: ignore[misc]
                if current is not first_upstream:
                    await current.__aexit__()
                current, old = follower, new.id
        finally:
            stop = True
            await asyncio.gather(*clients)
        assert statuses == []
        await current.__aexit__()
    await gateway.wait_until_settled()


# --- a server that stops ---


async def test_a_server_that_stops_closes_idle_connections_and_gives_streams_their_time() -> None:
    turn = asyncio.Event()

    async def script(call: Call) -> None:
        await call.start()
        await call.chunk(event("first"))
        if b"short" in call.body:
            await turn.wait()
            await call.chunk(DONE)
            await call.end()
        await call.closed.wait()

    with Gateway() as gateway:
        async with Upstream(script) as upstream:
            gateway.route(model(upstream.url))
            clients = await open_many(
                gateway, 1, raw_request(b'{"model":"m","user":"short"}')
            ) + await open_many(gateway, 1)
            clients.append(await asyncio.open_connection("127.0.0.1", gateway.port))
            short, long, idle = (reader for reader, _ in clients)
            for reader in short, long:
                await asyncio.wait_for(reader.readuntil(b"first"), HANG_S)
            gateway._server.should_exit = True
            assert await asyncio.wait_for(idle.read(), HANG_S) == b""
            turn.set()
            assert b"error" not in await asyncio.wait_for(short.read(), HANG_S)
            gateway._server.force_exit = True  # the time is over
            remaining_bytes = await asyncio.wait_for(long.read(), HANG_S)
            assert b"The gateway is stopping" in remaining_bytes
            assert b"[DONE]" not in remaining_bytes
            await until(lambda: all(call.closed.is_set() for call in upstream.calls))
            for _, writer in clients:
                writer.close()


# --- counts ---


class Notes(Meter):
    def __init__(self) -> None:
        self.lines: list[tuple[object, ...]] = []

    def count_start(self, exchange: object) -> None:
        self.lines.append(("begun",))

    def count_first_byte(self, exchange: object) -> None:
        self.lines.append(("first byte",))

    def count_refusal(self, exchange: object, error: Exception) -> None:
        self.lines.append(("refused", type(error).__name__))

    def count_end(self, exchange: object) -> None:
        assert isinstance(exchange, Exchange)
        self.lines.append(
            (
                "ended",
                exchange.outcome,
                exchange.answer.status,
                exchange.sent_bytes,
                *answer_usage(exchange.tail),
            )
        )


async def test_each_request_reaches_the_meter(gateway: Gateway) -> None:
    notes = Notes()
    body = json.dumps(
        {
            "choices": ["x" * 9000],
            "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12},
        }
    ).encode()

    async def script(call: Call) -> None:
        if b"stream" in call.body:
            await call.start()
            await call.chunk(event("a"))
            await call.chunk(
                b"data:"
                b' {"choices":[],"usage":{"prompt_tokens":3,"total_tokens":5,'
                b'"completion_tokens":2}}\n\n'
            )
            await call.chunk(b"data: [DONE]\n\n")
            await call.end()
        elif b"dies" in call.body:
            call.close()
        else:
            await call.reply(body)

    with Gateway(meter=notes) as gateway_with_notes:
        async with stage(gateway_with_notes, script), http_client(gateway_with_notes) as client:
            await client.post(CHAT, json=ASK)
            gateway_with_notes.catch_up()
            assert notes.lines == [
                ("begun",),
                ("first byte",),
                ("ended", "answered", 200, len(body), 7, 5, None),
            ]
            notes.lines.clear()
            await client.post(CHAT, json={**ASK, "stream": True})
            gateway_with_notes.catch_up()
            assert notes.lines[-1][:3] == ("ended", "answered", 200)
            assert notes.lines[-1][-3:] == (3, 2, None)
            notes.lines.clear()
            await client.post(CHAT, json={**ASK, "user": "dies"})
            gateway_with_notes.catch_up()
            assert notes.lines == [
                ("begun",),
                ("ended", "refused", 0, 0, None, None, None),
                ("refused", "UpstreamError"),
            ]
            notes.lines.clear()
            await client.post(CHAT, json={"model": "nope"})
            gateway_with_notes.catch_up()
            assert notes.lines == [("refused", "ModelNotFound")]


# --- a replica that freezes ---


async def begins_a_stream(call: Call) -> None:
    """The head of a stream, as vLLM sends it before the first token."""
    await call.start()
    await call.closed.wait()


async def streams_one(call: Call) -> None:
    await call.start()
    await call.chunk(event("from the other"))
    await call.chunk(b"data: [DONE]\n\n")
    await call.end()


def frozen_first(gateway: Gateway, *urls: str) -> None:
    route = model(*urls)
    gateway.route(replace(route, replicas=route.replicas[1:], frozen=(route.replicas[0].id,)))
    # Bytes since the last look count once more.
    gateway.later(0.5)
    gateway.later(0.5)


@pytest.mark.parametrize(
    ("script", "stream"), [(never_answers, False), (never_answers, True), (begins_a_stream, True)]
)
async def test_a_request_to_a_frozen_replica_is_answered_by_another(
    script: Callable[[Call], Awaitable[None]], stream: bool
) -> None:
    with Gateway(stands_still=True) as gateway:
        async with (
            Upstream(script) as frozen_engine,
            Upstream(streams_one if stream else answers) as other_upstream,
            http_client(gateway) as client,
        ):
            gateway.route(model(frozen_engine.url))
            asking = asyncio.create_task(client.post(CHAT, json={**ASK, "stream": stream}))
            await until(lambda: bool(frozen_engine.calls))
            if script is begins_a_stream:
                gateway.catch_up()
            frozen_first(gateway, frozen_engine.url, other_upstream.url)
            answer = await asking
            assert answer.status_code == 200
            assert other_upstream.calls[0].body == frozen_engine.calls[0].body
            assert (
                answer.text.count("from the other"),
                answer.text.endswith("data: [DONE]\n\n"),
            ) == ((1, True) if stream else (0, False))
            await until(frozen_engine.calls[0].closed.is_set)
            await gateway.wait_until_settled()


@pytest.mark.parametrize(("size", "has_others"), [(SMALL_BYTES + 1, True), (10, False)])
async def test_a_request_without_another_replica_gets_an_error(size: int, has_others: bool) -> None:
    """Because it is too large to be kept once the engine has it, or because there is no other
    replica."""
    with Gateway(stands_still=True) as gateway:
        async with (
            Upstream(never_answers) as frozen_engine,
            Upstream(answers) as other_upstream,
            http_client(gateway) as client,
        ):
            gateway.route(model(frozen_engine.url))
            asking = asyncio.create_task(client.post(CHAT, json={**ASK, "user": "x" * size}))
            await until(lambda: bool(frozen_engine.calls))
            frozen_first(
                gateway,
                *([frozen_engine.url, other_upstream.url] if has_others else [frozen_engine.url]),
            )
            answer = await asking
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_ready")
            assert int(answer.headers["retry-after"]) > 0
            assert not other_upstream.calls
            await gateway.wait_until_settled()


async def test_a_stream_that_began_ends_with_an_error_when_its_replica_freezes() -> None:
    with Gateway(stands_still=True) as gateway:
        async with (
            Upstream(streams_for_ever) as frozen_engine,
            Upstream(answers) as other_upstream,
            http_client(gateway) as client,
        ):
            gateway.route(model(frozen_engine.url))
            async with client.stream("POST", CHAT, json={**ASK, "stream": True}) as answer:
                pieces = answer.aiter_text()
                text = await anext(pieces)
                frozen_first(gateway, frozen_engine.url, other_upstream.url)
                text += "".join([piece async for piece in pieces])
            assert "first" in text
            assert '"error"' in text
            assert "[DONE]" not in text
            assert not other_upstream.calls
            await gateway.wait_until_settled()


DEAD = (
    b'{"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root'
    b' cause.", "code": 500}}'
)


async def closes(call: Call) -> None:
    call.close()


async def says_that_it_dies(call: Call) -> None:
    """As vLLM does when its core has died, until its server ends."""
    await call.reply(DEAD, "500 Internal Server Error")


async def says_so_in_pieces(call: Call) -> None:
    await call.send(
        b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: application/json\r\ncontent-length:"
        b" %d\r\n\r\n" % len(DEAD)
    )
    await asyncio.sleep(0.01)
    await call.send(DEAD)


async def break_off_error(call: Call) -> None:
    await call.send(
        b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: application/json\r\ncontent-length:"
        b" %d\r\n\r\n" % len(DEAD)
    )
    await asyncio.sleep(0.01)
    call.close()


DEATHS = (closes, says_that_it_dies, says_so_in_pieces, break_off_error)


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_whose_engine_dies_before_it_answered_is_answered_by_another_one(
    gateway: Gateway, death: Callable[[Call], Awaitable[None]], stream: bool
) -> None:
    calls: list[Call] = []

    async def first_dies(call: Call) -> None:
        calls.append(call)
        await (death if len(calls) == 1 else streams_one if stream else answers)(call)

    async with (
        Upstream(first_dies) as upstream,
        Upstream(first_dies) as other_upstream,
        http_client(gateway) as client,
    ):
        gateway.route(model(upstream.url, other_upstream.url))
        answer = await client.post(CHAT, json={**ASK, "stream": stream})
        assert answer.status_code == 200
        assert (len(upstream.calls), len(other_upstream.calls)) == (1, 1)
        assert calls[0].body == calls[1].body
        await gateway.wait_until_settled()


@pytest.mark.parametrize(("death", "status"), list(zip(DEATHS, (502, 500, 500), strict=False)))
async def test_a_request_that_kills_engines_is_asked_of_two_at_most(
    gateway: Gateway, death: Callable[[Call], Awaitable[None]], status: int
) -> None:
    async with (
        Upstream(death) as upstream,
        Upstream(death) as two,
        Upstream(death) as three,
        http_client(gateway) as client,
    ):
        gateway.route(model(upstream.url, two.url, three.url))
        answer = await client.post(CHAT, json=ASK)
        assert answer.status_code == status
        assert sum(len(engine.calls) for engine in (upstream, two, three)) == 2
        await gateway.wait_until_settled()


async def test_another_error_of_an_engine_is_passed_on_with_its_words(gateway: Gateway) -> None:
    async def fails(call: Call) -> None:
        await call.reply(b'{"error": {"message": "a bug"}}', "500 Internal Server Error")

    async with (
        Upstream(fails) as upstream,
        Upstream(answers) as other_upstream,
        http_client(gateway) as client,
    ):
        gateway.route(model(upstream.url))
        for _ in range(2):
            answer = await client.post(CHAT, json=ASK)
            assert (answer.status_code, answer.json()["error"]["message"]) == (500, "a bug")
        assert not other_upstream.calls
        await gateway.wait_until_settled()


class EndsTheNext(Meter):
    """Somebody ends a request in the moment in which its turn has come: after the answer to the
    request before, and before an engine is asked."""

    def __init__(self) -> None:
        self.plane: DataPlane
        self.victims: list[str] = []

    def count_completion(self, exchange: Exchange) -> None:
        if not self.victims:
            self.plane.loop.call_soon(self._end)

    def _end(self) -> None:
        [connection] = self.plane.connections
        exchange = connection.exchange
        assert exchange is not None
        self.victims.append(exchange.id)
        exchange.cancel()


async def test_a_request_that_is_ended_as_its_turn_comes_is_asked_of_no_engine() -> None:
    meter = EndsTheNext()
    with Gateway(meter=meter) as gateway:
        meter.plane = gateway.plane
        async with stage(gateway, answers) as [upstream]:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            requests = [
                GOOD.replace(b"host: x", b"host: x\r\nx-request-id: %d" % number)
                for number in range(3)
            ]
            requests[2] = requests[2].replace(b"host: x", b"host: x\r\nconnection: close")
            writer.write(b"".join(requests))
            text = await asyncio.wait_for(reader.read(), HANG_S)
            assert meter.victims == ["1"]
            assert re.findall(rb"HTTP/1.1 (\d+)", text) == [b"200", b"403", b"200"]
            assert re.findall(rb"x-request-id: (\d)", text) == [b"0", b"1", b"2"]
            assert len(upstream.requests) == 2
            writer.close()


class Broken(Meter):
    """Counts nothing, as no meter may."""

    def count_completion(self, exchange: Exchange) -> None:
        raise UnicodeDecodeError("utf-8", b"", 0, 1, exchange.outcome)


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_answer_ends_where_it_cannot_be_counted(
    chunked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The next request of the connection is served, and nothing stays in flight."""

    async def script(call: Call) -> None:
        if chunked:
            await call.start("application/json")
            await call.chunk(b"{}")
            await call.end()
        else:
            await call.reply(b"{}")

    with Gateway(meter=Broken()) as gateway:
        async with stage(gateway, script), http_client(gateway) as client:
            for _ in range(2):
                assert (await client.post(CHAT, json=ASK)).content == b"{}"
            gateway.catch_up()
            assert gateway.routes.in_flight("m-0") == 0
    assert "internal error in counting" in caplog.text
