"""The data plane over real sockets: clients that leave or read slowly, and the openai SDK."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import openai
import pytest

from gateway.proxy.routing.model_route import ModelRoute
from tests.support.dataplane import (
    ASK,
    CHAT,
    DONE,
    LIMIT,
    Gateway,
    address,
    answers,
    event,
    http_client,
    local,
    model,
    never_answers,
    raw_request,
    reads_on,
    refused_url,
    stage,
    streams_for_ever,
    until,
)
from tests.support.patience import HANG_S, hang_s
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio


def sdk(gateway: Gateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=HANG_S
    )


# --- clients that leave ---


@asynccontextmanager
async def visitor(
    gateway: Gateway, data: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, Callable[[], None]]]:
    """A raw client that has sent `data`; calling the second value makes it leave."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(data)
    try:
        yield reader, writer.transport.abort
    finally:
        writer.close()


async def wait_for_close(call: Call) -> None:
    """The engine sees that nobody waits any more: it has not answered, and by its own will it never
    would."""
    await asyncio.wait_for(call.closed.wait(), HANG_S)


async def test_a_client_that_leaves_in_its_own_body_reaches_no_engine(gateway: Gateway) -> None:
    async with stage(gateway, answers) as [upstream]:
        async with visitor(gateway, raw_request(b'{"model":"m"', length=1000)) as (_, leave):
            await until(lambda: len(gateway.plane.connections) == 1)
            leave()
            await gateway.wait_until_settled()
        assert upstream.calls == []


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_headers_closes_the_engine_connection(
    gateway: Gateway, stream: bool
) -> None:
    ask = raw_request(json.dumps({**ASK, "stream": stream}).encode())
    async with stage(gateway, never_answers) as [upstream], visitor(gateway, ask) as (_, leave):
        await until(lambda: len(upstream.requests) == 1)
        leave()
        await wait_for_close(upstream.calls[0])


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
        await asyncio.wait_for(reader.readuntil(first or b"\r\n\r\n"), HANG_S)
        leave()
        await wait_for_close(upstream.calls[0])


async def test_a_client_that_only_closes_its_sending_side_has_left_too(gateway: Gateway) -> None:
    async with stage(gateway, streams_for_ever) as [upstream]:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(raw_request(json.dumps(ASK).encode()))
        await asyncio.wait_for(reader.readuntil(b"first"), HANG_S)
        writer.write_eof()
        await wait_for_close(upstream.calls[0])
        writer.close()


async def test_a_client_that_leaves_while_the_engine_takes_no_bytes_leaves_nothing_behind(
    gateway: Gateway,
) -> None:
    ask = raw_request(json.dumps({**ASK, "x": "y" * (LIMIT - 1000)}).encode())
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        gateway.route(model(address(deaf)))
        async with visitor(gateway, ask) as (_, leave):
            await until(lambda: gateway.routes.total_in_flight == 1)
            leave()
            await gateway.wait_until_settled()


async def test_a_client_that_leaves_during_the_dial_leaves_nothing_behind(
    gateway: Gateway,
) -> None:
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
                await until(lambda: gateway.routes.total_in_flight == 1)
                leave()
                full.close()  # the kernel asks again within seconds, and is refused
                await gateway.wait_until_settled()
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
        await call.chunk(DONE)
        await call.end()

    ask = raw_request(json.dumps(ASK).encode())

    async def stay() -> None:
        async with visitor(gateway, ask) as (reader, _):
            await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), HANG_S)

    async def visit(seconds: float) -> None:
        async with visitor(gateway, ask) as (_, leave):
            await asyncio.sleep(seconds)
            leave()

    async def taste() -> None:
        async with visitor(gateway, ask) as (reader, leave):
            await asyncio.wait_for(reader.readuntil(event("x")), HANG_S)
            leave()

    async with stage(gateway, script, script) as upstreams:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*(stay() for _ in range(60)))
        # The next sixty requests leave at sixty points of the time that sixty at once take here.
        whole = loop.time() - began
        assert sum(len(upstream.requests) for upstream in upstreams) == 60
        for _ in range(3):
            await asyncio.gather(
                *(visit(whole * step / 60) for step in range(60)), *(taste() for _ in range(10))
            )
        await gateway.wait_until_settled()
        assert sum(len(upstream.requests) for upstream in upstreams) >= 90


async def streams_once(call: Call) -> None:
    await call.start()
    await call.chunk(event("a") + DONE)
    await call.end()


async def ask(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw_request(json.dumps(ASK).encode()))
    return reader, writer


async def test_a_request_has_no_task(gateway: Gateway) -> None:
    async with (
        stage(gateway, streams_for_ever) as [upstream],
        visitor(gateway, raw_request(json.dumps(ASK).encode())) as (reader, _),
    ):
        await asyncio.wait_for(reader.readuntil(b"first"), HANG_S)
        assert gateway.tasks() == gateway.idle_tasks
        assert upstream.requests


async def test_a_stopping_gateway_refuses_waiting_requests_and_closes_engine_connections() -> None:
    async with Upstream(never_answers) as upstream, local(upstream.url) as (plane, port):
        reader, writer = await ask(port)
        await until(lambda: len(upstream.requests) == 1)
        plane.close()
        assert b"model_not_ready" in await asyncio.wait_for(reader.read(), HANG_S)
        await asyncio.wait_for(upstream.calls[0].closed.wait(), HANG_S)
        assert plane.routes.total_in_flight == 0
        writer.close()


async def test_a_gateway_that_stops_ends_a_stream_with_an_error_event() -> None:
    async with Upstream(streams_for_ever) as upstream, local(upstream.url) as (plane, port):
        reader, writer = await ask(port)
        await asyncio.wait_for(reader.readuntil(b"first"), HANG_S)
        plane.close()
        remaining_bytes = await asyncio.wait_for(reader.read(), HANG_S)
        assert b"The gateway is stopping" in remaining_bytes
        assert b"[DONE]" not in remaining_bytes
        assert remaining_bytes.endswith(b"\r\n0\r\n\r\n")
        await asyncio.wait_for(upstream.calls[0].closed.wait(), HANG_S)
        writer.close()


@pytest.mark.parametrize(
    "anyio_backend", [("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True})]
)
async def test_a_client_that_leaves_before_the_answer_closes_the_engine_connection() -> None:
    async with Upstream(never_answers) as upstream, local(upstream.url) as (plane, port):
        for steps in range(60):
            _, writer = await ask(port)
            for _ in range(steps):
                await asyncio.sleep(0)
            writer.transport.abort()
            await until(lambda: plane.routes.total_in_flight == 0 and not plane.connections)
            for call in upstream.calls:
                await asyncio.wait_for(call.closed.wait(), HANG_S)
        assert upstream.requests


@pytest.mark.parametrize(
    "anyio_backend", [("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True})]
)
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("script", [answers, streams_once])
async def test_a_client_that_leaves_at_any_step_of_the_event_loop_loses_no_connection(
    warm: bool, script: Callable[[Call], Awaitable[None]]
) -> None:
    """Step by step through connecting, asking, answering and closing, on a new connection and on
    one used before."""
    has_answer = False

    async def whole(port: int) -> None:
        reader, writer = await ask(port)
        assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
        await reader.readuntil(b"\r\n0\r\n\r\n" if script is streams_once else b'"stop"}]}')
        writer.close()

    for steps in range(2000):
        async with Upstream(script) as upstream, local(upstream.url) as (plane, port):
            if warm:
                await asyncio.wait_for(whole(port), HANG_S)
            _, writer = await ask(port)
            for _ in range(steps):
                await asyncio.sleep(0)
            has_answer = len(upstream.requests) == 1 + warm and plane.routes.total_in_flight == 0
            writer.transport.abort()
            await until(lambda plane=plane: plane.routes.total_in_flight == 0)  # type: ignore[misc]
            await asyncio.wait_for(whole(port), HANG_S)
            # One connection is left, waiting for the next request; a second one would be lost for
            # ever.
            await until(
                lambda calls=upstream.calls: sum(not call.closed.is_set() for call in calls) == 1  # type: ignore[misc]
            )
            assert len(plane.pool(upstream.url).connections) == 1
        if has_answer:
            break
    assert has_answer


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
            [front] = gateway.plane.connections
            await until(lambda: not reads_on(front))
            assert upstream.calls[0].sent < total / 2
            byte_count = 0
            async for chunk in response.aiter_raw():
                start = byte_count % 256
                assert chunk[:16] == (block[:512])[start : start + 16][: len(chunk)]
                byte_count += len(chunk)
        assert byte_count == total


async def test_a_client_that_leaves_without_ever_reading_closes_the_engine_connection(
    gateway: Gateway,
) -> None:
    async def script(call: Call) -> None:
        await call.start()
        while True:
            await call.chunk(b"data: " + b"x" * 100_000 + b"\n\n")

    async with stage(gateway, script) as [upstream]:
        with socket.create_connection(("127.0.0.1", gateway.port)) as client:
            client.sendall(raw_request(json.dumps(ASK).encode()))
            await until(lambda: len(upstream.calls) == 1)
            [front] = gateway.plane.connections
            await until(lambda: not reads_on(front))
        await wait_for_close(upstream.calls[0])


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
        answer = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}]
        )
        assert answer.choices[0].message.content == "héllo"
        assert answer._request_id is not None
        assert answer._request_id.startswith("req_")
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        assert [chunk.choices[0].delta.content async for chunk in stream] == ["a", "é", "c"]
        assert [model_row.id async for model_row in client.models.list()] == ["m"]
        assert (await client.models.retrieve("m")).owned_by == "fitserve"


async def test_sdk_sees_its_own_error_classes() -> None:
    cold = ModelRoute("cold", "starting", "loading weights", 1, (), None)
    with Gateway(body_bytes=1024) as gateway:
        gateway.route(model(refused_url()), cold)
        async with sdk(gateway) as client:

            async def ask(name: str, content: str = "hi") -> None:
                await client.chat.completions.create(
                    model=name, messages=[{"role": "user", "content": content}]
                )

            with pytest.raises(openai.NotFoundError, match="'nope' does not exist") as missing:
                await ask("nope")
            assert missing.value.code == "model_not_found"
            with pytest.raises(
                openai.InternalServerError, match="starting: loading weights"
            ) as waiting:
                await ask("cold")
            assert (waiting.value.status_code, waiting.value.response.headers["retry-after"]) == (
                503,
                "10",
            )
            with pytest.raises(openai.InternalServerError) as unreachable:
                await ask("m")
            assert (unreachable.value.status_code, unreachable.value.code) == (
                502,
                "engine_unreachable",
            )
            with pytest.raises(openai.APIStatusError) as large:
                await ask("m", "x" * 50_000_000)
            assert (large.value.status_code, large.value.code) == (413, "body_too_large")
        await gateway.wait_until_settled()


async def test_sdk_sees_an_engine_that_dies_in_a_stream_as_an_error(gateway: Gateway) -> None:
    async def script(call: Call) -> None:
        await call.start()
        await call.chunk(event("a"))
        call.close()

    async with stage(gateway, script), sdk(gateway) as client:
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        assert (await anext(stream)).choices[0].delta.content == "a"
        with pytest.raises(openai.APIError, match="broke off"):
            await anext(stream)


async def test_sdk_closing_a_stream_closes_the_engine_connection(gateway: Gateway) -> None:
    async with stage(gateway, streams_for_ever) as [upstream], sdk(gateway) as client:
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        async for _ in stream:
            break
        await stream.close()
        await wait_for_close(upstream.calls[0])


async def test_a_hundred_streams_cancelled_at_once_leave_nothing_behind(gateway: Gateway) -> None:
    async with (
        stage(gateway, streams_for_ever, streams_for_ever) as upstreams,
        sdk(gateway) as client,
    ):
        starts = asyncio.Semaphore(0)

        async def consume() -> None:
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            async for _ in stream:
                starts.release()

        tasks = [asyncio.create_task(consume()) for _ in range(100)]
        async with asyncio.timeout(hang_s()):
            for _ in tasks:
                await starts.acquire()
        assert [gateway.routes.in_flight(f"m-{index}") for index in range(2)] == [50, 50]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        calls = [call for upstream in upstreams for call in upstream.calls]
        assert len(calls) == 100
        for call in calls:
            await wait_for_close(call)
