"""The data plane over real sockets: clients that leave or read slowly, and the openai SDK."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from gateway.serve.openai import OpenAI, new_client
from gateway.serve.routes import ModelRoute, Routes, RouteTable
from tests.dataplane import (
    ASK,
    CHAT,
    LEAVE_S,
    LIMIT,
    Gateway,
    address,
    answers,
    event,
    http_client,
    model,
    never_answers,
    raw_request,
    refused_url,
    stage,
    streams_for_ever,
    until,
)
from tests.upstream import Call, Upstream

pytestmark = [pytest.mark.local, pytest.mark.anyio]


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    """One gateway for all tests; each sets its own routes and must leave nothing behind."""
    with Gateway() as running:
        yield running


def sdk(gateway: Gateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=10)


# --- clients that leave ---


@asynccontextmanager
async def visitor(gateway: Gateway, data: bytes) -> AsyncIterator[tuple[asyncio.StreamReader, Callable[[], float]]]:
    """A raw client that has sent `data`; calling the second value makes it leave, and gives the time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)

    def leave() -> float:
        writer.transport.abort()
        return time.monotonic()

    writer.write(data)
    try:
        yield reader, leave
    finally:
        writer.close()


async def closed_soon_after(call: Call, left_at: float) -> None:
    await asyncio.wait_for(call.closed.wait(), LEAVE_S)
    assert call.closed_at is not None
    assert call.closed_at - left_at < LEAVE_S


async def test_a_client_that_leaves_in_its_own_body_reaches_no_engine(gateway: Gateway) -> None:
    async with stage(gateway, answers) as [upstream]:
        async with visitor(gateway, raw_request(b'{"model":"m"', length=1000)) as (_, leave):
            await until(lambda: gateway.tasks() > gateway.idle_tasks)
            leave()
            await gateway.settled(LEAVE_S)
        assert upstream.calls == []


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_engines_headers_closes_the_engine_connection(
    gateway: Gateway, stream: bool
) -> None:
    ask = raw_request(json.dumps({**ASK, "stream": stream}).encode())
    async with stage(gateway, never_answers) as [upstream], visitor(gateway, ask) as (_, leave):
        await until(lambda: len(upstream.requests) == 1)
        await closed_soon_after(upstream.calls[0], leave())


@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
@pytest.mark.parametrize("first", [b"", b"data: x\n\n"])
async def test_a_client_that_leaves_in_the_answer_closes_the_engine_connection(
    gateway: Gateway, kind: str, first: bytes
) -> None:
    async def script(call: Call) -> None:
        await call.start(kind)
        if first:
            await call.chunk(first)
        await call.closed.wait()

    ask = raw_request(json.dumps(ASK).encode())
    async with stage(gateway, script) as [upstream], visitor(gateway, ask) as (reader, leave):
        await asyncio.wait_for(reader.readuntil(first or b"\r\n\r\n"), 5)
        await closed_soon_after(upstream.calls[0], leave())


async def test_a_client_that_only_closes_its_sending_side_has_left_too(gateway: Gateway) -> None:
    async with stage(gateway, streams_for_ever) as [upstream]:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(raw_request(json.dumps(ASK).encode()))
        await asyncio.wait_for(reader.readuntil(b"first"), 5)
        writer.write_eof()
        await closed_soon_after(upstream.calls[0], time.monotonic())
        writer.close()


async def test_a_client_that_leaves_while_the_engine_takes_no_bytes_leaves_nothing_behind(gateway: Gateway) -> None:
    ask = raw_request(json.dumps({**ASK, "x": "y" * (LIMIT - 1000)}).encode())
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        gateway.route(model(address(deaf)))
        async with visitor(gateway, ask) as (_, leave):
            await until(lambda: gateway.routes.total_in_flight == 1, 5)
            leave()
            await gateway.settled(LEAVE_S)


async def test_a_client_that_leaves_while_the_connection_is_not_made_yet_leaves_nothing_behind(gateway: Gateway) -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        try:
            gateway.route(model(address(full)))
            async with visitor(gateway, raw_request(json.dumps(ASK).encode())) as (_, leave):
                await until(lambda: gateway.routes.total_in_flight == 1, 5)
                leave()
                full.close()  # the kernel asks again within seconds, and is refused
                await gateway.settled()
        finally:
            for filler in fillers:
                filler.close()


async def test_clients_that_leave_at_any_moment_leave_nothing_behind(gateway: Gateway) -> None:
    async def script(call: Call) -> None:
        await asyncio.sleep(0.003)
        await call.start()
        for _ in range(10):
            await call.chunk(event("x"))
            await asyncio.sleep(0.001)
        await call.end()

    ask = raw_request(json.dumps(ASK).encode())

    async def stay() -> None:
        async with visitor(gateway, ask) as (reader, _):
            await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 10)

    async def visit(seconds: float) -> None:
        async with visitor(gateway, ask) as (_, leave):
            await asyncio.sleep(seconds)
            leave()

    async with stage(gateway, script, script) as upstreams:
        began = time.monotonic()
        await asyncio.gather(*(stay() for _ in range(60)))
        whole = time.monotonic() - began  # how long sixty at once take here: the next ones leave at sixty points of that
        assert sum(len(upstream.requests) for upstream in upstreams) == 60
        for _ in range(3):
            await asyncio.gather(*(visit(whole * step / 60) for step in range(60)))
        await gateway.settled()
        assert sum(len(upstream.requests) for upstream in upstreams) > 60


async def streams_once(call: Call) -> None:
    await call.start()
    await call.chunk(event("a"))
    await call.end()


class Served:
    """A request as a server would bring it, without a socket: its body at once, then nothing until the client leaves.

    A client that has left takes nothing more, and one that does not read takes nothing at all: sending blocks.
    """

    def __init__(self, app: OpenAI, reads: bool = True) -> None:
        self._takes = asyncio.Event()
        if reads:
            self._takes.set()
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._messages.put_nowait({"type": "http.request", "body": json.dumps(ASK).encode()})
        self.sent: list[Any] = []
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
        self.task = asyncio.create_task(app(scope, self._messages.get, self._send))

    async def _send(self, message: Any) -> None:
        await self._takes.wait()
        self.sent.append(message)

    def leave(self) -> None:
        self._takes.clear()
        self._messages.put_nowait({"type": "http.disconnect"})


async def test_no_task_outlives_an_answered_request() -> None:
    async with Upstream(answers) as upstream, new_client() as client:
        before = asyncio.all_tasks()
        request = Served(OpenAI(Routes(RouteTable({"m": model(upstream.url)})), client, LIMIT))
        await asyncio.wait_for(request.task, 5)
        assert request.sent[0]["status"] == 200
        left = {getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks() - before}
        assert left <= {"Upstream._serve", "Call.read_requests"}


async def test_a_server_that_cancels_the_request_closes_the_engine_connection() -> None:
    async with Upstream(never_answers) as upstream, new_client() as client:
        routes = Routes(RouteTable({"m": model(upstream.url)}))
        request = Served(OpenAI(routes, client, LIMIT))
        await until(lambda: len(upstream.requests) == 1)
        request.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request.task
        await asyncio.wait_for(upstream.calls[0].closed.wait(), LEAVE_S)
        assert (request.sent, routes.total_in_flight) == ([], 0)


async def test_a_server_that_cancels_a_request_whose_client_does_not_read_closes_the_engine_connection() -> None:
    async with Upstream(streams_for_ever) as upstream, new_client() as client:
        request = Served(OpenAI(Routes(RouteTable({"m": model(upstream.url)})), client, LIMIT), reads=False)
        await until(lambda: bool(upstream.calls) and upstream.calls[0].sent > 0)
        request.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(request.task, LEAVE_S)
        await asyncio.wait_for(upstream.calls[0].closed.wait(), LEAVE_S)


async def test_a_client_that_leaves_at_any_step_before_an_answer_closes_the_engine_connection() -> None:
    async with Upstream(never_answers) as upstream, new_client() as client:
        app = OpenAI(Routes(RouteTable({"m": model(upstream.url)})), client, LIMIT)
        for steps in range(60):
            request = Served(app)
            for _ in range(steps):
                await asyncio.sleep(0)
            request.leave()
            await asyncio.wait_for(request.task, LEAVE_S)
            for call in upstream.calls:
                await asyncio.wait_for(call.closed.wait(), LEAVE_S)
        assert upstream.requests


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True})])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("script", [answers, streams_once])
async def test_a_client_that_leaves_at_any_step_of_the_event_loop_loses_no_connection(
    warm: bool, script: Callable[[Call], Awaitable[None]]
) -> None:
    """Step by step through connecting, asking, answering and closing, on a new connection and on one used before."""
    answered = False
    for steps in range(2000):
        async with Upstream(script) as upstream, new_client() as client:
            app = OpenAI(Routes(RouteTable({"m": model(upstream.url)})), client, LIMIT)
            if warm:
                await asyncio.wait_for(Served(app).task, 5)
            request = Served(app)
            for _ in range(steps):
                await asyncio.sleep(0)
            answered = request.task.done()
            request.leave()
            await asyncio.wait_for(request.task, LEAVE_S)
            after = Served(app)
            await asyncio.wait_for(after.task, 5)
            assert after.sent[0]["status"] == 200
            # One connection is left, waiting for the next request; a second one would be lost for ever.
            await until(lambda calls=upstream.calls: sum(not call.closed.is_set() for call in calls) == 1)  # type: ignore[misc]
        if answered:
            break
    assert answered


async def test_a_slow_client_slows_the_engine_and_gets_every_byte(gateway: Gateway) -> None:
    total = 64 * 1024 * 1024
    block = bytes(range(256)) * 1024

    async def script(call: Call) -> None:
        await call.start()
        for _ in range(total // len(block)):
            await call.chunk(block)
        await call.end()

    async with stage(gateway, script) as [upstream], http_client(gateway) as client:
        async with client.stream("POST", CHAT, json=ASK) as response:
            await until(lambda: bool(upstream.calls) and upstream.calls[0].sent > 0, 5)
            before = -1
            while before != upstream.calls[0].sent:
                before = upstream.calls[0].sent
                await asyncio.sleep(0.2)
            assert before < total / 2
            received = 0
            async for chunk in response.aiter_raw():
                start = received % 256
                assert chunk[:16] == (block[:512])[start : start + 16][: len(chunk)]
                received += len(chunk)
        assert received == total


async def test_a_client_that_leaves_without_ever_reading_closes_the_engine_connection(gateway: Gateway) -> None:
    async def script(call: Call) -> None:
        await call.start()
        while True:
            await call.chunk(b"data: " + b"x" * 100_000 + b"\n\n")

    async with stage(gateway, script) as [upstream]:
        with socket.create_connection(("127.0.0.1", gateway.port)) as client:
            client.sendall(raw_request(json.dumps(ASK).encode()))
            await until(lambda: bool(upstream.calls) and upstream.calls[0].sent > 0, 5)
            before = -1
            while before != upstream.calls[0].sent:
                before = upstream.calls[0].sent
                await asyncio.sleep(0.2)
        await closed_soon_after(upstream.calls[0], time.monotonic())


# --- the openai SDK ---


async def test_sdk_answers_streams_and_lists(gateway: Gateway) -> None:
    async def script(call: Call) -> None:
        if not json.loads(call.body).get("stream"):
            await answers(call)
            return
        await call.start()
        for text in "a", "é", "c":
            await call.chunk(event(text))
        await call.chunk(b"data: [DONE]\n\n")
        await call.end()

    async with stage(gateway, script), sdk(gateway) as client:
        answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        assert answer.choices[0].message.content == "héllo"
        assert answer._request_id is not None
        assert answer._request_id.startswith("req_")
        stream = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True)
        assert [chunk.choices[0].delta.content async for chunk in stream] == ["a", "é", "c"]
        assert [listed.id async for listed in client.models.list()] == ["m"]
        assert (await client.models.retrieve("m")).owned_by == "fitserve"


async def test_sdk_sees_its_own_error_classes() -> None:
    cold = ModelRoute("cold", "starting", "loading weights", 1, (), None)
    with Gateway(limit=1024) as gateway:
        gateway.route(model(refused_url()), cold)
        async with sdk(gateway) as client:

            async def ask(name: str, content: str = "hi") -> None:
                await client.chat.completions.create(model=name, messages=[{"role": "user", "content": content}])

            with pytest.raises(openai.NotFoundError, match="'nope' does not exist") as missing:
                await ask("nope")
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.InternalServerError, match="starting: loading weights") as waiting:
                await ask("cold")
            assert (waiting.value.status_code, waiting.value.response.headers["retry-after"]) == (503, "10")
            with pytest.raises(openai.InternalServerError) as unreachable:
                await ask("m")
            assert (unreachable.value.status_code, unreachable.value.code) == (502, "engine_unreachable")
            with pytest.raises(openai.APIStatusError) as large:
                await ask("m", "x" * 50_000_000)
            assert (large.value.status_code, large.value.code) == (413, "body_too_large")
        await gateway.settled()


async def test_sdk_sees_an_engine_that_dies_in_a_stream_as_an_error(gateway: Gateway) -> None:
    async def script(call: Call) -> None:
        await call.start()
        await call.chunk(event("a"))
        call.close()

    async with stage(gateway, script), sdk(gateway) as client:
        stream = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True)
        assert (await anext(stream)).choices[0].delta.content == "a"
        with pytest.raises(openai.APIError, match="broke off"):
            await anext(stream)


async def test_sdk_closing_a_stream_closes_the_engine_connection(gateway: Gateway) -> None:
    async with stage(gateway, streams_for_ever) as [upstream], sdk(gateway) as client:
        stream = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True)
        async for _ in stream:
            break
        left_at = time.monotonic()
        await stream.close()
        await closed_soon_after(upstream.calls[0], left_at)


async def test_a_hundred_streams_cancelled_at_once_leave_nothing_behind(gateway: Gateway) -> None:
    async with stage(gateway, streams_for_ever, streams_for_ever) as upstreams, sdk(gateway) as client:
        started = asyncio.Semaphore(0)

        async def consume() -> None:
            stream = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True)
            async for _ in stream:
                started.release()

        tasks = [asyncio.create_task(consume()) for _ in range(100)]
        async with asyncio.timeout(30):
            for _ in tasks:
                await started.acquire()
        assert [gateway.routes.in_flight(f"m-{index}") for index in range(2)] == [50, 50]
        left_at = time.monotonic()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        calls = [call for upstream in upstreams for call in upstream.calls]
        assert len(calls) == 100
        for call in calls:
            await closed_soon_after(call, left_at)
