"""The surface over real sockets: every path, tasks, Anthropic's shape, responses that stick to
their replica, forms."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.proxy.access.auth import Keys
from gateway.proxy.api.endpoints import ENDPOINTS, Endpoint, find, is_inference
from gateway.proxy.routing.route_table import RouteTable
from gateway.secret import Secret
from tests.support.dataplane import (
    ASK,
    Gateway,
    http_client,
    model,
    raw_request,
    refused_url,
    stage,
)
from tests.support.endpoint_bodies import body_of, form_request
from tests.support.patience import HANG_S, hang_s
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio


async def ok(call: Call) -> None:
    await call.reply(b"{}")


# --- the table ---


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
async def test_each_row_is_found_and_goes_where_it_says(
    gateway: Gateway, endpoint: Endpoint
) -> None:
    assert is_inference(endpoint.path)
    assert find(endpoint.path, b"", endpoint.method) is endpoint
    async with stage(gateway, ok) as [upstream], http_client(gateway) as client:
        if endpoint.body == "form":
            response = await client.post(
                endpoint.path, data={"model": "m"}, files={"file": b"RIFF"}
            )
        elif endpoint.method == "POST":
            response = await client.post(endpoint.path, json={"model": "m"})
        else:
            response = await client.get(endpoint.path)
        assert response.status_code == 200
        assert response.headers["x-gateway-source"] == (
            "gateway" if endpoint.destination == "models" else "engine"
        )
        heads = [call.head[0] for call in upstream.calls]
        assert heads == (
            [] if endpoint.destination == "models" else [f"POST {endpoint.path} HTTP/1.1".encode()]
        )


@pytest.mark.parametrize(
    "endpoint", [row for row in ENDPOINTS if row.body == "json"], ids=lambda endpoint: endpoint.path
)
async def test_a_model_is_asked_only_for_its_abilities(
    gateway: Gateway, endpoint: Endpoint
) -> None:
    for task in "generate", "embed":
        gateway.route(model(refused_url(), task=task))
        async with http_client(gateway) as client:
            response = await client.post(endpoint.path, json={"model": "m"})
            assert response.status_code == (502 if task in endpoint.tasks else 400)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/loads",
        "/v1/chat/completions/render",
        "/v1/completions/derender",
        "/v1/responses/render",
        "/v1/messages/render",
        "/v1/messages/batches",
        "/v1/audio",
        "/v1/responses/a/b",
        "/v1/responses/a%2Fb",
        "/v1/responses//cancel",
        "/v1/responses/%0d%0a",
        "/v2/embed",
        "/v1/fine_tuning/jobs",
    ],
)
async def test_other_paths_of_engines_are_not_found(gateway: Gateway, path: str) -> None:
    async with stage(gateway, ok) as [upstream], http_client(gateway) as client:
        for method in "GET", "POST":
            response = await client.request(method, path, json={"model": "m"})
            assert response.status_code == 404, response.text
        assert upstream.calls == []


async def test_paths_of_engines_outside_v1_are_fastapis(gateway: Gateway) -> None:
    async with stage(gateway, ok) as [upstream], http_client(gateway) as client:
        for path in (
            "/sleep",
            "/wake_up",
            "/invocations",
            "/generate",
            "/pooling",
            "/metrics",
            "/update_weights",
            "/shutdown",
        ):
            assert (await client.post(path, json={"model": "m"})).headers["x-asgi"] == "1"
        assert upstream.calls == []


@pytest.mark.parametrize(
    "path",
    ["/v1-openai/chat/completions", "/v1-openai/embeddings", "/api/v0/chat/completions"],
)
async def test_paths_of_gpustack_and_lm_studio_are_those_of_v1(gateway: Gateway, path: str) -> None:
    async with http_client(gateway) as client, Upstream(ok) as upstream:
        gateway.route(model(upstream.url, task="embed" if "embed" in path else "generate"))
        response = await client.post(path, json={"model": "m"})
        assert (response.status_code, response.headers["x-gateway-source"]) == (200, "engine")
        name = path.split("/", 2 if path.startswith("/v1") else 3)[-1]
        assert [call.head[0] for call in upstream.calls] == [f"POST /v1/{name} HTTP/1.1".encode()]
        assert (await client.get(path)).status_code == 405


async def test_a_list_under_gpustacks_path_needs_a_key_like_v1() -> None:
    with Gateway(keys=Keys(None, Secret("api-secret"))) as gateway:
        async with http_client(gateway) as client:
            assert (await client.get("/v1-openai/models")).status_code == 401
            headers = {"authorization": "Bearer api-secret"}
            answer = await client.get("/v1-openai/models", headers=headers)
            assert answer.json()["object"] == "list"


# --- Anthropic ---


async def test_errors_have_anthropics_shape_under_its_paths() -> None:
    with Gateway(keys=Keys(None, Secret("api-secret"))) as gateway:
        gateway.route(model(refused_url()))
        async with http_client(gateway) as client:
            for path in "/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches":
                response = await client.post(path, json=ASK)
                assert response.status_code == 401
                assert response.json()["type"] == "error"
                assert response.json()["error"]["type"] == "authentication_error"
            client.headers["x-api-key"] = "api-secret"
            for body, status, kind in (
                ({"model": "nope"}, 404, "not_found_error"),
                ({}, 400, "invalid_request_error"),
                (ASK, 502, "api_error"),
            ):
                response = await client.post("/v1/messages", json=body)
                assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
            # The same header lets in on all paths of inference, for Anthropic's SDK lists models
            # there; errors keep the shape of the path.
            response = await client.post("/v1/chat/completions", json=ASK)
            assert (response.status_code, "type" in response.json()) == (502, False)


async def test_a_stream_of_messages_that_breaks_ends_with_an_error_event(gateway: Gateway) -> None:
    async def script(call: Call) -> None:
        await call.start()
        await call.chunk(b'event: message_start\ndata: {"type":"message_start"}\n\n')
        call.close()

    async with stage(gateway, script), http_client(gateway) as client:
        content = (await client.post("/v1/messages", json={**ASK, "stream": True})).content
        last = content.split(b"\n\n")[-2]
        assert last.startswith(b"event: error\ndata: ")
        assert json.loads(last.partition(b"data: ")[2])["error"]["type"] == "api_error"


# --- responses ---


async def test_a_response_stays_with_the_replica_that_made_it(gateway: Gateway) -> None:
    response_count = 0

    async def script(call: Call) -> None:
        nonlocal response_count
        if call.head[0].startswith(b"POST /v1/responses HTTP"):
            response_count += 1
            if b"stream" in call.body:
                await call.start()
                await call.chunk(
                    b"event: response.created\ndata:"
                    b' {"type":"response.created","response":{"id":"resp_%d"}}\n\n' % response_count
                )
                await call.chunk(b"event: response.completed\ndata: {}\n\n")
                await call.end()
            else:
                await call.reply(b'{"id":"resp_%d","object":"response"}' % response_count)
        else:
            await call.reply(b"{}")

    async with stage(gateway, script, script, script) as upstreams, http_client(gateway) as client:
        makers = {}
        for number in range(1, 7):
            before = [len(upstream.requests) for upstream in upstreams]
            await client.post(
                "/v1/responses",
                json={"model": "m", "input": "x", **({"stream": True} if number % 2 else {})},
            )
            after = [len(upstream.requests) for upstream in upstreams]
            makers[f"resp_{number}"] = next(
                index for index in range(3) if after[index] > before[index]
            )
        assert set(makers.values()) == {0, 1, 2}
        for id_, index in makers.items():
            requests = upstreams[index].requests
            count = len(requests)
            assert (
                await client.get(f"/v1/responses/{id_}?stream=true&starting_after=3")
            ).status_code == 200
            assert (await client.get(f"/v1/responses/{id_}?evil=1")).status_code == 200
            assert (await client.post(f"/v1/responses/{id_}/cancel")).status_code == 200
            body = {"model": "m", "input": "y", "previous_response_id": id_}
            assert (await client.post("/v1/responses", json=body)).status_code == 200
            made_here = upstreams[index].requests[count:]
            assert [request.split(b"\r\n")[0] for request in made_here] == [
                f"GET /v1/responses/{id_}?stream=true&starting_after=3 HTTP/1.1".encode(),
                f"GET /v1/responses/{id_} HTTP/1.1".encode(),
                f"POST /v1/responses/{id_}/cancel HTTP/1.1".encode(),
                b"POST /v1/responses HTTP/1.1",
            ]
        assert (await client.get("/v1/responses/resp_999")).status_code == 404
        gateway.routes.table = RouteTable({})
        assert (await client.get("/v1/responses/resp_1")).status_code == 404


# --- forms ---


async def ask(gateway: Gateway, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(data)
    line = await asyncio.wait_for(reader.readline(), HANG_S)
    writer.close()
    return line[9:12]


SOUND = bytes(range(256)) * 4096
FILE = ('name="file"; filename="a.wav"', SOUND)


@pytest.mark.parametrize("served", ["m", "whisper large"])
@pytest.mark.parametrize("length", [True, False])
@pytest.mark.parametrize(
    "parts",
    [
        [('name="model"', b"m"), FILE],
        [FILE, ('name="model"', b"m")],
        [('name="x"', b'name="model"'), ("name=model", b"m"), FILE],
    ],
)
async def test_a_form_arrives_as_it_was_sent(
    gateway: Gateway, parts: list[tuple[str, bytes]], length: bool, served: str
) -> None:
    body = body_of(*parts)
    form = body.replace(b"\r\n\r\nm\r\n", b"\r\n\r\n" + served.encode() + b"\r\n")
    async with stage(gateway, ok, served=served) as [upstream]:
        assert await ask(gateway, form_request(body, length=length)) == b"200"
        assert upstream.calls[0].headers["content-type"] == 'multipart/form-data; boundary="XyZ"'
        assert upstream.calls[0].body == form


async def test_a_long_form_goes_on_before_it_is_complete(gateway: Gateway) -> None:
    body = body_of(('name="model"', b"m"), ('name="file"; filename="a"', SOUND * 4))
    async with stage(gateway, ok) as [upstream]:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        data = form_request(body)
        writer.write(data[: len(data) // 2])
        await writer.drain()
        async with asyncio.timeout(hang_s()):
            while not upstream.calls:
                await asyncio.sleep(0.01)
        assert upstream.requests == []
        writer.write(data[len(data) // 2 :])
        assert await asyncio.wait_for(reader.readline(), HANG_S) == b"HTTP/1.1 200 OK\r\n"
        assert upstream.calls[0].body == body
        writer.close()


async def test_the_connection_goes_on_after_a_long_form(gateway: Gateway) -> None:
    data = form_request(body_of(('name="model"', b"m"), FILE))
    async with stage(gateway, ok) as [upstream]:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        for count in range(1, 4):
            writer.write(data)
            assert await asyncio.wait_for(reader.readuntil(b"{}"), HANG_S)
            assert len(upstream.requests) == count
        writer.close()


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (body_of(FILE), b"multipart/form-data; boundary=XyZ"),
        (body_of(('name="model"; filename="x"', b"m")), b"multipart/form-data; boundary=other"),
        (body_of(('name="model"', b"\xff")), b"multipart/form-data; boundary=XyZ"),
        (b'{"model":"m"}', b"application/json"),
        (b"model=m", b"application/x-www-form-urlencoded"),
        (b"", b"multipart/form-data; boundary=XyZ"),
        (body_of(('name="model"', b"m")), b"multipart/form-data"),
        (body_of(('name="model"', b"m")), b'multipart/form-data; boundary="a\\"b"'),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_a_form_without_a_model_is_a_bad_request(
    gateway: Gateway, body: bytes, content_type: bytes
) -> None:
    async with stage(gateway, ok) as [upstream]:
        assert await ask(gateway, form_request(body, content_type)) == b"400"
        assert upstream.calls == []


async def test_a_model_behind_a_long_file_does_not_change_the_first(gateway: Gateway) -> None:
    """The engine that has the beginning already never gets the end."""
    body = body_of(('name="model"', b"m"), FILE, FILE, ('name="model"', b"secret"))
    async with stage(gateway, ok) as [upstream]:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        data = form_request(body)
        at = len(data) // 2
        writer.write(data[:at])
        async with asyncio.timeout(hang_s()):
            while not upstream.calls:
                await asyncio.sleep(0.01)
        writer.write(data[at:])
        assert (await asyncio.wait_for(reader.readline(), HANG_S)).startswith(b"HTTP/1.1 400 ")
        await asyncio.wait_for(upstream.calls[0].closed.wait(), HANG_S)
        assert upstream.requests == []
        writer.close()


async def test_json_for_a_form_and_a_form_for_json_are_bad_requests(gateway: Gateway) -> None:
    async with stage(gateway, ok) as [upstream]:
        assert (
            await ask(gateway, raw_request(b'{"model":"m"}', "/v1/audio/transcriptions")) == b"400"
        )
        assert await ask(gateway, raw_request(body_of(('name="model"', b"m")))) == b"400"
        assert upstream.calls == []
