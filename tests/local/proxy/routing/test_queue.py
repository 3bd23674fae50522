"""Requests that wait, on real sockets: for a place at a busy engine, and for a model that is not
ready yet."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from gateway.proxy.routing.class_places import HALF_LIFE_S, TURN
from gateway.proxy.routing.model_route import ModelRoute
from tests.support.dataplane import (
    ASK,
    CHAT,
    Gateway,
    answers,
    event,
    http_client,
    model,
    raw_request,
    refused_url,
    until,
)
from tests.support.endpoint_bodies import body_of, form_request
from tests.support.patience import HANG_S
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

STREAM = {**ASK, "stream": True}
MESSAGES = {"model": "m", "max_tokens": 9, "messages": ASK["messages"], "stream": True}


def busy(*urls: str, capacity: int = 1, **fields: Any) -> ModelRoute:
    route = model(*urls)
    return replace(
        route,
        replicas=tuple(replace(replica, capacity=capacity) for replica in route.replicas),
        **fields,
    )


def starting_model(wait_s: float = 30) -> ModelRoute:
    return replace(model(), state="starting", detail="loading weights", wait_s=wait_s)


class Gate:
    """An engine whose answers wait until they are let out."""

    def __init__(self) -> None:
        self._open = asyncio.Semaphore(0)
        self.max_running = self.running = 0

    async def script(self, call: Call) -> None:
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        waiting = [
            asyncio.ensure_future(self._open.acquire()),
            asyncio.ensure_future(call.closed.wait()),
        ]
        _, tasks = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        self.running -= 1
        if not call.closed.is_set():
            (
                await streams(call)
                if b'"stream": true' in call.body or b'"stream":true' in call.body
                else await answers(call)
            )

    def let_through(self, count: int = 1) -> None:
        for _ in range(count):
            self._open.release()


async def streams(call: Call) -> None:
    await call.start()
    await call.chunk(event("a"))
    await call.chunk(b"data: [DONE]\n\n")
    await call.end()


async def refuses(call: Call) -> None:
    await call.reply(
        json.dumps({"error": {"message": "too long", "code": 400}}, indent=1).encode(),
        "400 Bad Request",
    )


def ask(
    client: httpx.AsyncClient, body: dict[str, Any] = ASK, path: str = CHAT
) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(client.post(path, json=body))


@asynccontextmanager
async def start_with_gate(
    gateway: Gateway, capacity: int = 1
) -> AsyncIterator[tuple[Gate, Upstream, httpx.AsyncClient]]:
    gate = Gate()
    async with Upstream(gate.script) as upstream, http_client(gateway) as client:
        gateway.route(busy(upstream.url, capacity=capacity))
        yield gate, upstream, client
        await gateway.wait_until_settled()
        assert gateway.routes._queues == {}


# --- a busy engine ---


async def test_a_chat_takes_the_place_that_a_batch_leaves_free() -> None:
    """The engine runs two requests at once, and gets a third to follow."""
    with Gateway() as gateway:
        async with start_with_gate(gateway, capacity=3) as (gate, upstream, client):

            def post(class_: str, user: str) -> asyncio.Task[httpx.Response]:
                headers = {"x-fitserve-priority": class_}
                body = {**ASK, "user": user}
                return asyncio.create_task(client.post(CHAT, json=body, headers=headers))

            tasks = [post("batch", f"batch-{number}") for number in range(2)]
            await until(lambda: (gateway.routes.waiting("m"), len(upstream.requests)) == (1, 1))
            tasks.append(post("normal", "chat"))
            await until(lambda: (gateway.routes.waiting("m"), len(upstream.requests)) == (1, 2))
            assert b"chat" in upstream.requests[1]
            gate.let_through(3)
            assert {(await task).status_code for task in tasks} == {200}
            assert not any(b"x-fitserve" in request for request in upstream.requests)


async def test_an_engine_with_an_order_gets_the_priority_and_another_gets_none() -> None:
    with Gateway() as gateway:
        async with Upstream(answers) as upstream, http_client(gateway) as client:
            for factor, priority in ((0, None), (1, 100), (-1, -100)):
                route = model(upstream.url)
                replicas = (replace(route.replicas[0], priority_factor=factor),)
                gateway.route(replace(route, replicas=replicas))
                # The second request repeats the head of the first one.
                for _ in range(2):
                    headers = {"x-fitserve-priority": "batch"}
                    assert (await client.post(CHAT, json=ASK, headers=headers)).status_code == 200
                    body = json.loads(upstream.requests[-1].partition(b"\r\n\r\n")[2])
                    assert body.get("priority") == priority


async def test_a_normal_request_reaches_an_engine_with_an_order_as_it_came() -> None:
    with Gateway() as gateway:
        async with Upstream(answers) as upstream, http_client(gateway) as client:
            route = model(upstream.url)
            replica = replace(route.replicas[0], priority_factor=1, has_default_priority=True)
            gateway.route(replace(route, replicas=(replica,)))
            for fields, priority in (({}, None), ({"priority": -9}, 0), ({"priority": 5}, 5)):
                await client.post(CHAT, json={**ASK, **fields})
                body = json.loads(upstream.requests[-1].partition(b"\r\n\r\n")[2])
                assert body.get("priority") == priority


async def test_an_overdue_batch_is_no_later_class_in_the_queue_of_the_engine() -> None:
    """Chats fill the engine's own queue always, so the batch would wait there for ever."""
    with Gateway() as gateway:
        async with start_with_gate(gateway, capacity=5) as (gate, upstream, client):
            route = gateway.routes.table.models["m"]
            replicas = (replace(route.replicas[0], priority_factor=1),)
            gateway.route(replace(route, replicas=replicas))

            def post(class_: str) -> asyncio.Task[httpx.Response]:
                headers = {"x-fitserve-priority": class_}
                return asyncio.create_task(
                    client.post(CHAT, json={**ASK, "user": class_}, headers=headers)
                )

            tasks = [post("normal") for _ in range(5)]
            await until(lambda: gate.running == 5)
            tasks.append(post("batch"))
            await until(lambda: gateway.routes.waiting("m") == 1)
            tasks += [post("normal") for _ in range(TURN)]
            await until(lambda: gateway.routes.waiting("m") == 1 + TURN)
            for count in range(1, TURN + 1):
                gate.let_through()
                await until(lambda count=count: len(upstream.requests) == 5 + count)  # type: ignore[misc]
            bodies = [
                json.loads(request.partition(b"\r\n\r\n")[2]) for request in upstream.requests
            ]
            assert [body["user"] for body in bodies].count("batch") == 1
            assert {body["priority"] for body in bodies} == {0}
            gate.let_through(len(tasks))
            assert {(await task).status_code for task in tasks} == {200}


async def test_a_waiting_batch_gets_places_back_while_its_first_request_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Gateway() as gateway:
        async with start_with_gate(gateway, capacity=10) as (gate, _, client):

            def post(class_: str) -> asyncio.Task[httpx.Response]:
                headers = {"x-fitserve-priority": class_}
                return asyncio.create_task(client.post(CHAT, json=ASK, headers=headers))

            tasks = [post("normal") for _ in range(8)]
            await until(lambda: gate.running == 8)
            tasks += [post("batch") for _ in range(7)]
            await until(lambda: gateway.routes.waiting("m") == 7)
            gate.let_through(8)
            await until(lambda: (gate.running, gateway.routes.waiting("m")) == (1, 6))
            later_s = time.monotonic() + 100 * HALF_LIFE_S
            monkeypatch.setattr(gateway.routes, "clock_s", lambda: later_s)
            await until(lambda: gate.running == 7)
            gate.let_through(7)
            assert {(await task).status_code for task in tasks} == {200}


async def test_an_engine_never_has_more_than_it_takes_and_all_are_answered() -> None:
    with Gateway() as gateway:
        async with start_with_gate(gateway, capacity=3) as (gate, upstream, client):
            tasks = [ask(client) for _ in range(20)]
            await until(lambda: (gateway.routes.waiting("m"), len(upstream.requests)) == (17, 3))
            gate.let_through(20)
            assert {(await task).status_code for task in tasks} == {200}
            assert gate.max_running == 3
            assert len(upstream.calls) == 3  # waiting ones got the connections of those before


async def test_waiting_requests_are_answered_in_order_of_coming() -> None:
    with Gateway() as gateway:
        async with start_with_gate(gateway) as (gate, upstream, client):
            tasks = []
            for number in range(6):
                tasks.append(ask(client, {**ASK, "user": f"u{number}"}))
                await until(
                    lambda number=number: (  # type: ignore[misc]
                        gateway.routes.waiting("m") + len(upstream.requests) == number + 1
                    )
                )
            gate.let_through(6)
            await asyncio.gather(*tasks)
            assert [request.partition(b'"user":"')[2][:2] for request in upstream.requests] == [
                b"u%d" % n for n in range(6)
            ]


async def test_a_request_beyond_the_queue_is_refused_at_once() -> None:
    """While nobody moves: neither the engine, nor a waiting client, nor the clock.
    benchmarks/overload.py tells in how many ms."""
    with Gateway(queue_per_model=4, stands_still=True) as gateway:
        async with start_with_gate(gateway) as (gate, upstream, client):
            tasks = [ask(client) for _ in range(5)]
            await until(lambda: gateway.routes.waiting("m") == 4)
            for body, path in (
                (ASK, CHAT),
                (STREAM, CHAT),
                (MESSAGES, "/v1/messages"),
                *[(ASK, CHAT)] * 20,
            ):
                response = await client.post(path, json=body)
                assert (response.status_code, response.headers["x-gateway-source"]) == (
                    429,
                    "gateway",
                )
                assert int(response.headers["retry-after"]) >= 1
                # Anthropic and OpenAI have the same word for this type.
                error = response.json()["error"]
                assert error["type"] == "rate_limit_error"
                assert "'m' are busy" in error["message"]
                assert (gateway.routes.waiting("m"), gate.running, len(upstream.requests)) == (
                    4,
                    1,
                    1,
                )
            gate.let_through(5)
            assert {(await task).status_code for task in tasks} == {200}


async def test_clients_that_leave_a_busy_engine_leave_the_queue() -> None:
    with Gateway(stands_still=True) as gateway:
        async with start_with_gate(gateway) as (gate, upstream, client):
            first = ask(client)
            await until(lambda: gateway.routes.total_in_flight == 1)
            leaving = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(50)]
            for _, writer in leaving:
                writer.write(raw_request(json.dumps(ASK).encode()))
            await until(lambda: gateway.routes.waiting("m") == 50)
            last = ask(client)
            await until(lambda: gateway.routes.waiting("m") == 51)
            for _, writer in leaving:
                writer.transport.abort()
            await until(lambda: gateway.routes.waiting("m") == 1)
            gate.let_through(2)
            assert [(await task).status_code for task in (first, last)] == [200, 200]
            assert len(upstream.requests) == 2


async def test_a_wait_over_the_limit_is_refused_also_in_a_begun_stream() -> None:
    with Gateway(queue_timeout_s=120, waiting_comment_s=10, stands_still=True) as gateway:
        async with start_with_gate(gateway) as (gate, _, client):
            first = ask(client)
            await until(lambda: gateway.routes.total_in_flight == 1)
            waiting = ask(client), ask(client, STREAM)
            await until(lambda: gateway.routes.waiting("m") == 2)
            for _ in range(11):
                gateway.later(10.5)
            assert gateway.routes.waiting("m") == 2  # 115.5 s are not too long
            gateway.later(10.5)
            plain, stream = await asyncio.gather(*waiting)
            assert (plain.status_code, plain.json()["error"]["code"]) == (429, "overloaded")
            assert "has waited for 126 s" in plain.json()["error"]["message"]
            assert (stream.status_code, stream.headers["x-gateway-source"]) == (200, "gateway")
            comments, _, last = stream.text.rpartition("data: ")
            assert comments == ": waiting\n\n" * 11
            assert json.loads(last)["error"]["code"] == "overloaded"
            gate.let_through()
            assert (await first).status_code == 200


async def test_a_request_that_takes_no_place_is_answered_while_others_wait() -> None:
    with Gateway() as gateway:
        async with start_with_gate(gateway) as (gate, upstream, client):
            tasks = [ask(client) for _ in range(3)]
            await until(lambda: gateway.routes.waiting("m") == 2)
            count = ask(client, {"model": "m", "prompt": "x"}, "/tokenize")
            await until(lambda: len(upstream.requests) == 2)
            gate.let_through(4)
            assert {(await task).status_code for task in (*tasks, count)} == {200}


# --- a model that is not ready ---


@pytest.fixture
async def soon() -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    """A gateway whose model starts, and is waited for; a comment comes every ten seconds of its own
    clock."""
    with Gateway(waiting_comment_s=10, stands_still=True) as gateway:
        async with http_client(gateway) as client:
            gateway.route(starting_model())
            yield gateway, client
            await gateway.wait_until_settled()
            assert gateway.routes._queues == {}


async def test_a_model_that_is_not_ready_refuses_at_once_by_default(
    soon: tuple[Gateway, httpx.AsyncClient],
) -> None:
    gateway, client = soon
    gateway.route(starting_model(0))
    response = await client.post(CHAT, json=STREAM)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "model_not_ready")
    assert response.headers["retry-after"] == "10"


async def test_waiting_requests_are_answered_when_the_model_is_ready(
    soon: tuple[Gateway, httpx.AsyncClient],
) -> None:
    gateway, client = soon
    tasks = [ask(client, body) for body in (ASK, STREAM) * 5]
    await until(lambda: gateway.routes.waiting("m") == 10)
    async with Upstream(
        lambda call: streams(call) if b'"stream"' in call.body else answers(call)
    ) as upstream:
        gateway.later(11)
        gateway.later(11)
        gateway.route(busy(upstream.url, capacity=2))
        for index, task in enumerate(tasks):
            response = await task
            assert response.status_code == 200
            if index % 2 == 0:
                assert response.json()["id"] == "c1"
                assert response.headers["x-gateway-source"] == "engine"
            else:
                comments, _, rest = response.text.partition("data: ")
                assert comments == ": waiting\n\n" * 2
                assert ("data: " + rest).encode() == event("a") + b"data: [DONE]\n\n"
                assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        # The connections can be used again.
        assert (await client.post(CHAT, json=STREAM)).content == event("a") + b"data: [DONE]\n\n"


async def test_a_short_wait_leaves_no_trace_in_a_stream(
    soon: tuple[Gateway, httpx.AsyncClient],
) -> None:
    gateway, client = soon
    task = ask(client, STREAM)
    await until(lambda: gateway.routes.waiting("m") == 1)
    async with Upstream(streams) as upstream:
        gateway.route(model(upstream.url))
        response = await task
    assert response.content == event("a") + b"data: [DONE]\n\n"
    assert response.headers["x-gateway-source"] == "engine"


@pytest.mark.parametrize(("path", "body"), [(CHAT, STREAM), ("/v1/messages", MESSAGES)])
async def test_an_engines_error_after_a_comment_is_an_event(
    soon: tuple[Gateway, httpx.AsyncClient], path: str, body: dict[str, Any]
) -> None:
    gateway, client = soon
    task = ask(client, body, path)
    await until(lambda: gateway.routes.waiting("m") == 1)
    gateway.later(11)
    async with Upstream(refuses) as upstream:
        gateway.route(model(upstream.url))
        response = await task
        assert response.status_code == 200
        *_, last = response.text.rstrip().split("\n\n")
        assert last.startswith("event: error\ndata: " if path != CHAT else "data: ")
        form = {"type": "invalid_request_error", "param": None, "code": None}
        error: dict[str, Any] = {"error": {"message": "too long", **form}}
        if path != CHAT:  # in the shape that this client reads
            error = {
                "type": "error",
                "error": {"type": "invalid_request_error", "message": "too long"},
            }
        assert json.loads(last.partition("data: ")[2]) == error
        assert "[DONE]" not in response.text
        assert (await client.post(CHAT, json=ASK)).status_code == 400


async def test_an_engine_that_dies_after_a_comment_ends_the_stream_with_an_error(
    soon: tuple[Gateway, httpx.AsyncClient],
) -> None:
    async def dies(call: Call) -> None:
        call.close()

    gateway, client = soon
    task = ask(client, STREAM)
    await until(lambda: gateway.routes.waiting("m") == 1)
    gateway.later(11)
    async with Upstream(dies) as upstream:
        gateway.route(model(upstream.url))
        response = await task
    assert response.status_code == 200
    assert json.loads(response.text.rpartition("data: ")[2])["error"]["code"] == "engine_error"


async def test_a_client_of_http_1_0_hears_comments_without_chunks(
    soon: tuple[Gateway, httpx.AsyncClient],
) -> None:
    gateway, _ = soon
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(raw_request(json.dumps(STREAM).encode()).replace(b"HTTP/1.1", b"HTTP/1.0"))
    await until(lambda: gateway.routes.waiting("m") == 1)
    gateway.later(11)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HANG_S)
    assert b"connection: close" in head
    async with Upstream(streams) as upstream:
        gateway.route(model(upstream.url))
        body = await asyncio.wait_for(reader.read(), HANG_S)
    assert body == b": waiting\n\n" + event("a") + b"data: [DONE]\n\n"
    writer.close()


@pytest.mark.parametrize("served", ["m", "whisper large"])
@pytest.mark.parametrize("length", [True, False])
async def test_a_long_form_waits_half_read_and_arrives_whole(
    soon: tuple[Gateway, httpx.AsyncClient], length: bool, served: str
) -> None:
    async def ok(call: Call) -> None:
        await call.reply(b"{}")

    gateway, _ = soon
    body = body_of(
        ('name="model"', b"m"), ('name="file"; filename="a.wav"', bytes(range(256)) * 16_384)
    )
    data = form_request(body, length=length)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(data[: len(data) // 2])
    await until(lambda: gateway.routes.waiting("m") == 1)
    writer.write(data[len(data) // 2 :])
    [front] = gateway.plane.connections
    await until(lambda: front.is_reading_paused)
    assert front.exchange is not None
    assert len(front.exchange.upload.body) < 1024 * 1024
    async with Upstream(ok) as upstream:
        gateway.route(model(upstream.url, served=served))
        assert await asyncio.wait_for(reader.readline(), HANG_S) == b"HTTP/1.1 200 OK\r\n"
        assert upstream.calls[0].body == body.replace(
            b"\r\n\r\nm\r\n", b"\r\n\r\n" + served.encode() + b"\r\n"
        )
    writer.close()


async def test_requests_behind_one_that_waits_are_answered_after_it(
    soon: tuple[Gateway, httpx.AsyncClient],
) -> None:
    gateway, _ = soon
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(
        raw_request(json.dumps(ASK).encode()) + b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    )
    await until(lambda: gateway.routes.waiting("m") == 1)
    async with Upstream(answers) as upstream:
        gateway.route(model(upstream.url))
        first = await asyncio.wait_for(reader.readuntil(b'"finish_reason": "stop"}]}'), HANG_S)
        second = await asyncio.wait_for(reader.readuntil(b'"object":"list"'), HANG_S)
    assert b"x-gateway-source: engine" in first
    assert b"x-gateway-source: gateway" in second
    writer.close()


@pytest.mark.parametrize("body", [ASK, STREAM])
async def test_a_waiting_request_is_refused_at_its_limit(body: dict[str, Any]) -> None:
    with Gateway(waiting_comment_s=0, stands_still=True) as gateway:
        gateway.route(starting_model(30))
        async with http_client(gateway) as client:
            task = ask(client, body)
            await until(lambda: gateway.routes.waiting("m") == 1)
            gateway.later(29)
            assert gateway.routes.waiting("m") == 1
            gateway.later(2)
            response = await task
            assert (response.status_code, response.json()["error"]["code"]) == (
                503,
                "model_not_ready",
            )
            assert "loading weights" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("late_route", "status"), [(None, 404), (replace(model(), state="quarantined"), 503)]
)
async def test_a_replica_that_will_not_come_is_not_waited_for(
    soon: tuple[Gateway, httpx.AsyncClient], late_route: ModelRoute | None, status: int
) -> None:
    gateway, client = soon
    task = ask(client)
    await until(lambda: gateway.routes.waiting("m") == 1)
    gateway.route(*([late_route] if late_route is not None else []))
    assert (await task).status_code == status


async def test_a_stopping_gateway_tells_waiting_clients(
    soon: tuple[Gateway, httpx.AsyncClient],
) -> None:
    gateway, client = soon
    task = ask(client)
    await until(lambda: gateway.routes.waiting("m") == 1)
    for connection in list(gateway.plane.connections):
        gateway._loop.call_soon_threadsafe(connection.stop)
    response = await task
    assert (response.status_code, response.json()["error"]["message"]) == (
        503,
        "The gateway is stopping. Try again in a moment.",
    )


# --- swapping engines under load ---


async def test_a_model_whose_engine_is_replaced_under_load_loses_no_request() -> None:
    """The old engine is taken out of the table, ends its requests, and dies; the new one comes when
    all clients wait."""
    stop = False
    counts: dict[int, int] = {}

    async def short(call: Call) -> None:
        await asyncio.sleep(0.02)
        await streams(call) if b'"stream"' in call.body else await answers(call)

    async def client_of(gateway: Gateway, body: dict[str, Any]) -> None:
        async with http_client(gateway) as client:
            while not stop:
                response = await client.post(CHAT, json=body)
                good = response.status_code == 200 and "error" not in response.text
                status = response.status_code if good or response.status_code != 200 else 0
                counts[status] = counts.get(status, 0) + 1

    with Gateway(waiting_comment_s=1, stands_still=True) as gateway:
        gateway.route(starting_model())
        clients = [asyncio.create_task(client_of(gateway, body)) for body in (ASK, STREAM) * 10]
        try:
            for _ in range(5):
                async with Upstream(short) as engine:
                    gateway.route(busy(engine.url, capacity=8, wait_s=30))
                    await until(lambda engine=engine: len(engine.requests) > 50)  # type: ignore[misc]
                    gateway.route(starting_model())
                    await until(lambda: gateway.routes.total_in_flight == 0)
                    before = len(engine.requests)
                    await until(lambda: gateway.routes.waiting("m") == len(clients))
                    assert len(engine.requests) == before
                gateway.later(2)  # nothing is there at all
            async with Upstream(short) as engine:
                gateway.route(busy(engine.url, capacity=8))
                stop = True
                await asyncio.gather(*clients)
        finally:
            stop = True
            for each_client in clients:
                each_client.cancel()
        assert list(counts) == [200]
        assert counts[200] > 250
        await gateway.wait_until_settled()


async def test_an_engine_that_is_dead_and_still_in_the_table_is_waited_out() -> None:
    with Gateway() as gateway:
        gateway.route(replace(model(refused_url()), wait_s=30))
        async with http_client(gateway) as client:
            tasks = [ask(client) for _ in range(5)]
            await until(lambda: gateway.routes.waiting("m") == 5)
            gateway.route(starting_model())
            async with Upstream(answers) as upstream:
                gateway.route(model(upstream.url))
                assert {(await task).status_code for task in tasks} == {200}
        await gateway.wait_until_settled()


async def test_a_dead_engine_without_waiting_is_a_502_and_then_a_503() -> None:
    with Gateway() as gateway:
        gateway.route(model(refused_url()))
        async with http_client(gateway) as client:
            assert (await client.post(CHAT, json=ASK)).json()["error"][
                "code"
            ] == "engine_unreachable"
        await gateway.wait_until_settled()


# --- overload ---


async def test_no_place_stays_empty_at_three_times_the_load_and_the_others_are_refused() -> None:
    """For each request that the two engines end three come. At any speed of this machine: the place
    goes to a waiting one, one of the three takes its place, and the other two are refused while
    every place is taken. benchmarks/overload.py measures the share of an engine's time, and the
    speed of a refusal.
    """
    capacity, queue, rounds = 5, 32, 40
    gates = Gate(), Gate()
    tasks_of_clients: list[asyncio.Task[httpx.Response]] = []
    refusal_count = 0
    with Gateway(queue_per_model=queue, stands_still=True) as gateway:
        async with (
            Upstream(gates[0].script) as upstream,
            Upstream(gates[1].script) as two,
            http_client(gateway) as client,
        ):
            gateway.route(busy(upstream.url, two.url, capacity=capacity))

            def state() -> tuple[int, ...]:
                return (*(gate.running for gate in gates), gateway.routes.waiting("m"))

            def asked_count() -> int:
                return len(upstream.requests) + len(two.requests)

            tasks_of_clients += [ask(client) for _ in range(2 * capacity + queue)]
            await until(lambda: state() == (capacity, capacity, queue))
            for turn in range(rounds):
                request_count = asked_count()
                gates[turn % 2].let_through()
                await until(lambda count=request_count + 1: asked_count() == count)  # type: ignore[misc]
                await until(lambda: state() == (capacity, capacity, queue - 1))
                tasks_of_clients.append(ask(client))
                await until(lambda: state() == (capacity, capacity, queue))
                for response in await asyncio.gather(ask(client), ask(client)):
                    assert (response.status_code, response.json()["error"]["code"]) == (
                        429,
                        "overloaded",
                    )
                    assert int(response.headers["retry-after"]) >= 1
                    refusal_count += 1
                assert state() == (capacity, capacity, queue)
            for gate in gates:
                gate.let_through(len(tasks_of_clients))
            assert {(await task).status_code for task in tasks_of_clients} == {200}
        assert max(gate.max_running for gate in gates) == capacity
        assert (
            len(upstream.requests) + len(two.requests)
            == len(tasks_of_clients)
            == 2 * capacity + queue + rounds
        )
        assert refusal_count == 2 * rounds
        await gateway.wait_until_settled()
