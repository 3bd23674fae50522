"""The data plane over real sockets: passed and refused requests, engines that fail."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import threading
from dataclasses import replace
from typing import Any

import httpx
import pytest

from gateway.proxy.access import media_hosts
from gateway.proxy.routing.model_route import ModelCard, ModelRoute
from gateway.proxy.routing.route_table import RouteTable
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
    stage,
    streams_for_ever,
    until,
)
from tests.support.patience import HANG_S, hang_s
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio


# --- passed requests ---


async def test_an_answer_passes_through_untouched(gateway: Gateway) -> None:
    body = b' {"choices" :\t[], "n": 1.50, "s":"\\u00e9\xc3\xa9" }\n'

    async def script(call: Call) -> None:
        await call.reply(
            body,
            headers=(
                "content-type: application/json; charset=x\r\nserver: engine\r\nset-cookie: a=b\r\n"
            ),
        )

    async with stage(gateway, script) as [upstream], http_client(gateway) as client:
        response = await client.post(CHAT, json=ASK, headers={"x-request-id": "mine-1"})
        assert (response.status_code, response.content) == (200, body)
        assert dict(response.headers) == {
            "content-type": "application/json; charset=x",
            "content-length": str(len(body)),
            "x-request-id": "mine-1",
            "x-gateway-source": "engine",
        }
        assert [call.body for call in upstream.calls] == [response.request.content]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/embeddings"])
async def test_every_inference_path_reaches_the_engine_under_the_same_path(
    gateway: Gateway, path: str
) -> None:
    async with stage(gateway, answers) as [upstream], http_client(gateway) as client:
        assert (await client.post(f"{path}?a=b", json=ASK)).status_code == 200
        assert upstream.calls[0].head[0] == f"POST {path} HTTP/1.1".encode()


async def test_the_engine_sees_new_headers_and_none_of_the_clients_secrets(
    gateway: Gateway,
) -> None:
    client_headers = {
        "authorization": "Bearer secret",
        "cookie": "a=b",
        "x-forwarded-for": "1.2.3.4",
        "connection": "x-drop",
        "x-drop": "1",
        "te": "trailers",
        "accept-encoding": "gzip",
        "accept": "text/event-stream",
        "content-type": "text/plain",
        "x-request-id": "bad id",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate": "a=1",
        "user-agent": "me",
    }
    async with stage(gateway, answers) as [upstream], http_client(gateway) as client:
        response = await client.post(CHAT, content=json.dumps(ASK), headers=client_headers)
        headers = upstream.calls[0].headers
        assert headers == {
            "host": upstream.url.removeprefix("http://"),
            "content-type": "application/json",
            "content-length": str(len(json.dumps(ASK))),
            "accept": "text/event-stream",
            "accept-encoding": "identity",
            "traceparent": client_headers["traceparent"],
            "tracestate": "a=1",
            "x-request-id": response.headers["x-request-id"],
        }
        assert headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("value", [b"\xff", "é".encode(), b"a\tb", b"x" * 513])
async def test_a_header_value_that_an_engine_could_choke_on_is_not_forwarded(
    gateway: Gateway, value: bytes
) -> None:
    async with stage(gateway, answers) as [upstream], http_client(gateway) as client:
        response = await client.post(
            CHAT, json=ASK, headers={b"accept": value, b"tracestate": value, b"traceparent": value}
        )
        assert response.status_code == 200
        assert not {"accept", "tracestate", "traceparent"} & set(upstream.calls[0].headers)


async def test_an_error_of_the_engine_keeps_its_words_in_openais_form(gateway: Gateway) -> None:
    body = (
        b'{"object":"error","message":"max_tokens is too'
        b' large","type":"BadRequestError","code":400}'
    )

    async def script(call: Call) -> None:
        status = "429 Slow Down" if b'"slow"' in call.body else "400 Bad Request"
        await call.reply(body, status, "content-type: application/json\r\nretry-after: 3\r\n")

    async with stage(gateway, script), http_client(gateway) as client:
        kinds = {400: "invalid_request_error", 429: "rate_limit_error"}
        for extra, status in ({}, 400), ({"user": "slow"}, 429):
            response = await client.post(CHAT, json={**ASK, **extra})
            error = {"message": "max_tokens is too large", "type": kinds[status]}
            assert response.json() == {"error": {**error, "param": None, "code": None}}
            assert response.status_code == status
            assert response.headers["x-gateway-source"] == "engine"
            assert response.headers["retry-after"] == "3"


@pytest.mark.parametrize("is_whole", [True, False])
async def test_a_field_that_the_engine_misses_is_found_misspelt_in_the_request(
    gateway: Gateway, is_whole: bool
) -> None:
    body = json.dumps({"error": {"message": "No messages.", "param": "messages", "code": 400}})

    async def script(call: Call) -> None:
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-length: {len(body)}\r\n\r\n"
        if is_whole:
            await call.send(f"{head}{body}".encode())
        else:
            await call.send(head.encode())
            await asyncio.sleep(0.05)
            await call.send(body.encode())

    async with stage(gateway, script), http_client(gateway) as client:
        response = await client.post(CHAT, json={"model": ASK["model"], "mesages": []})
        hint = "Did you mean `messages` instead of `mesages`?"
        assert response.json()["error"]["message"] == f"No messages. {hint}"
        response = await client.post(CHAT, json=ASK)
        assert response.json()["error"]["message"] == "No messages."


async def test_an_event_stream_arrives_chunk_by_chunk_with_its_bytes_unchanged(
    gateway: Gateway,
) -> None:
    chunks = [
        b": ping\r\n\r\n",
        b"data: {\xc3",
        b"\xa9}\n",
        b"\n",
        event("a") + event("b"),
        b"data: [DONE]\n\n",
    ]
    turn = asyncio.Semaphore(0)

    async def script(call: Call) -> None:
        await call.start()
        for chunk in chunks:
            await call.chunk(chunk)
            await turn.acquire()
        await call.end()

    async with stage(gateway, script), http_client(gateway) as client:
        async with client.stream("POST", CHAT, json={**ASK, "stream": True}) as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert "content-length" not in response.headers
            pieces = []
            async with asyncio.timeout(hang_s()):
                async for chunk in response.aiter_raw():
                    pieces.append(chunk)
                    turn.release()
        assert pieces == chunks


async def test_a_compressed_answer_stays_compressed_and_says_so(gateway: Gateway) -> None:
    body = b"\x1f\x8b not really gzip, so nobody may unpack it"

    async def script(call: Call) -> None:
        await call.reply(body, headers="content-encoding: gzip\r\n")

    async with (
        stage(gateway, script),
        http_client(gateway) as client,
        client.stream("POST", CHAT, json=ASK) as response,
    ):
        assert response.headers["content-encoding"] == "gzip"
        assert b"".join([chunk async for chunk in response.aiter_raw()]) == body


async def test_a_model_of_another_name_in_the_engine_is_renamed_alone(
    gateway: Gateway,
) -> None:
    async with (
        stage(gateway, answers, served="/models/x y") as [upstream],
        http_client(gateway) as client,
    ):
        response = await client.post(
            CHAT, content=b'{ "temperature":1.0e+0, "model":"m", "x":{"model" : "m"} }'
        )
        assert response.status_code == 200
        assert (
            upstream.calls[0].body
            == b'{"temperature":1.0e+0,"model":"/models/x y","x":{"model" : "m"}}'
        )


async def test_the_last_of_repeated_models_is_routed(gateway: Gateway) -> None:
    async with stage(gateway, answers) as [upstream], http_client(gateway) as client:
        assert (
            await client.post(CHAT, content=b'{"model":"m","model":"other"}')
        ).status_code == 404
        assert upstream.calls == []
        assert (
            await client.post(CHAT, content=b'{"model":"other","model":"m"}')
        ).status_code == 200


async def test_one_connection_serves_requests_in_turn_on_both_sides(gateway: Gateway) -> None:
    async with stage(gateway, answers) as [upstream], http_client(gateway) as client:
        for _ in range(5):
            await client.post(CHAT, json=ASK)
        assert [len(call.requests) for call in upstream.calls] == [5]


async def test_requests_go_to_the_replica_with_the_least_in_flight(gateway: Gateway) -> None:
    async with (
        stage(gateway, streams_for_ever, answers) as [busy, idle],
        http_client(gateway) as client,
    ):
        answer = await client.send(client.build_request("POST", CHAT, json=ASK), stream=True)
        for _ in range(4):
            assert (await client.post(CHAT, json=ASK)).status_code == 200
        assert gateway.routes.in_flight("m-0") == 1
        assert (len(busy.requests), len(idle.requests)) == (1, 4)
        await answer.aclose()


# --- refusals of the gateway itself ---


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code", "param"),
    [
        ("POST", CHAT, b"", 400, "bad_request", None),
        ("POST", CHAT, b"[1]", 400, "bad_request", None),
        ("POST", CHAT, b'{"model":"m","x":' + b"[" * 200_000, 400, "bad_request", None),
        ("POST", CHAT, b'{"model":"m","temperature":NaN}', 400, "bad_request", None),
        ("POST", CHAT, b'{"model":"\\ud800"}', 400, "bad_request", None),
        ("POST", CHAT, b'{"model":"m","x":"\xff"}', 400, "bad_request", None),
        ("POST", CHAT, b"{}", 400, "bad_request", "model"),
        ("POST", CHAT, b'{"model":7}', 400, "bad_request", "model"),
        ("POST", CHAT, b'{"model":""}', 404, "model_not_found", "model"),
        ("POST", CHAT, b'{"model":"\\u0000<b>\xf0\x9f\x94\x91"}', 404, "model_not_found", "model"),
        ("POST", CHAT, b'{"model":"cold"}', 503, "model_not_ready", "model"),
        ("POST", CHAT, b'{"model":"embedder"}', 400, "bad_request", "model"),
        ("POST", "/v1/embeddings", b'{"model":"writer"}', 400, "bad_request", "model"),
        ("GET", "/v1/models/nope", b"", 404, "model_not_found", "model"),
        ("POST", "/v1/responses", b"{}", 400, "bad_request", "model"),
        ("GET", "/v1/responses/resp_1", b"", 404, "not_found", None),
        ("POST", "/v1/load_lora_adapter", b"{}", 404, "not_found", None),
        ("GET", "/v1", b"", 404, "not_found", None),
        ("POST", CHAT + "/", b"{}", 404, "not_found", None),
        ("POST", "/v1/chat/completions/%2e%2e/%2e%2e/sleep", b"{}", 404, "not_found", None),
        ("POST", "/v1/\xff", b"{}", 404, "not_found", None),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_a_request_that_cannot_be_served_gets_the_envelope(
    gateway: Gateway,
    method: str,
    path: str,
    content: bytes,
    status: int,
    code: str,
    param: str | None,
) -> None:
    cold = ModelRoute(
        "cold",
        "backing off",
        "the engine died, next start 12:00:00",
        1,
        (),
        "generate",
        retry_after_s=42,
    )
    writer = model(refused_url(), name="writer", task="generate")
    embedder = model(refused_url(), name="embedder", task="embed")
    gateway.route(model(refused_url()), cold, writer, embedder)
    async with http_client(gateway) as client:
        response = await client.request(
            method, path, content=content, headers={"x-request-id": "r1"}
        )
        assert response.status_code == status
        assert response.headers["content-type"] == "application/json"
        assert response.headers["x-gateway-source"] == "gateway"
        assert response.headers["x-request-id"] == "r1"
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["code"], error["param"]) == (code, param)
        if status == 503:
            assert "backing off: the engine died, next start 12:00:00" in error["message"]
            assert response.headers["retry-after"] == "42"
        if code == "model_not_found":
            assert "GET /v1/models" in error["message"]
    await gateway.wait_until_settled()


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", CHAT, "POST"),
        ("OPTIONS", CHAT, "POST"),
        ("HEAD", "/v1/models", "GET"),
        ("TRACE", CHAT, "POST"),
        ("DELETE", "/v1/models/m", "GET"),
    ],
)
async def test_a_wrong_method_is_told_the_right_one(
    gateway: Gateway, method: str, path: str, allow: str
) -> None:
    gateway.route(model(refused_url()))
    async with http_client(gateway) as client:
        response = await client.request(method, path)
        assert (response.status_code, response.headers["allow"]) == (405, allow)
        assert method == "HEAD" or response.json()["error"]["code"] == "method_not_allowed"


async def test_models_lists_all_wishes_in_every_state(gateway: Gateway) -> None:
    cold = ModelRoute("cold", "starting", "loading weights", 1700000000, (), None)
    card = ModelCard(4096, ("text", "image"), "proven", "proven", "not proven", "unknown")
    gateway.route(
        replace(model(refused_url(), task="generate"), card=card),
        model(refused_url(), name="org/n-1.5"),
        cold,
    )
    async with http_client(gateway) as client:
        document = (await client.get("/v1/models")).json()
        assert [model_row["id"] for model_row in document["data"]] == ["m", "org/n-1.5", "cold"]
        assert document["data"][0] == {
            "id": "m",
            "object": "model",
            "created": 1700000000,
            "owned_by": "fitserve",
            "type": "model",
            "display_name": "m",
            "created_at": "2023-11-14T22:13:20+00:00",
            "state": "ready",
            "wait_s": 0.0,
            "task": "generate",
            "max_model_len": 4096,
            "modalities": {"input": ["text", "image"], "output": ["text"]},
            "tools": "proven",
            "required_tools": "proven",
            "reasoning": "not proven",
            "json_schema": "unknown",
        }
        unknown_model = document["data"][2]
        assert (
            unknown_model["state"],
            unknown_model["max_model_len"],
            unknown_model["modalities"]["input"],
            unknown_model["tools"],
        ) == ("starting", None, [], "unknown")
        assert (await client.get("/v1/models/cold")).json() == unknown_model
        for path in "org/n-1.5", "org%2Fn-1.5":
            assert (await client.get(f"/v1/models/{path}")).json() == document["data"][1]
        gateway.routes.table = RouteTable({})
        assert (await client.get("/v1/models")).json()["data"] == []


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_over_the_limit_is_refused_while_most_of_it_is_still_to_come(
    announced: bool,
) -> None:
    with Gateway(body_bytes=1024) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        if announced:
            writer.write(raw_request(b"{", length=10**12))
        else:
            writer.write(
                b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n800\r\n"
                % CHAT.encode()
                + b" " * 0x800
            )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HANG_S)
        assert head.startswith(b"HTTP/1.1 413 ")
        assert b"body_too_large" in await asyncio.wait_for(reader.readuntil(b"}}"), HANG_S)
        writer.close()
        await gateway.wait_until_settled()


async def test_a_body_at_the_limit_is_served_and_one_byte_more_is_not() -> None:
    body = b'{"model":"m","x":"' + b"y" * 1004 + b'"}'
    with Gateway(body_bytes=len(body)) as small:
        async with stage(small, answers), http_client(small) as client:
            assert (await client.post(CHAT, content=body)).status_code == 200
            assert (await client.post(CHAT, content=body + b" ")).status_code == 413


@pytest.mark.parametrize(
    "line", [b"GET /v1/models", b"POST /", b"POST /admin/models", b"POST /v1/chat/completions"]
)
async def test_a_websocket_is_refused_and_its_connection_closed(
    gateway: Gateway, line: bytes
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(
        line
        + b" HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\ncontent-length:"
        b" 5\r\n\r\n"
    )
    answer = await asyncio.wait_for(reader.read(), HANG_S)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"WebSockets are not supported." in answer
    writer.close()
    await until(lambda: not gateway.plane.connections)


@pytest.mark.parametrize("line", [b"POST /admin/models", b"POST /v1/chat/completions"])
@pytest.mark.parametrize(
    "piece", [b"a: b\r\n" * 1000, b"a" * 6000], ids=["many trailers", "a trailer without end"]
)
async def test_trailers_without_end_are_refused_and_never_kept(
    gateway: Gateway, line: bytes, piece: bytes
) -> None:
    gateway.route(model(refused_url()))
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(
        line + b" HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    )
    byte_count = 0
    with contextlib.suppress(ConnectionError):
        while byte_count < 64 << 20 and not reader.at_eof():
            writer.write(piece)
            byte_count += len(piece)
            await asyncio.wait_for(writer.drain(), HANG_S)
            await asyncio.sleep(0)
    assert byte_count < 16 << 20  # bytes before the kernel hears of the gateway's end
    writer.close()


async def test_trailers_of_a_body_are_left_out(gateway: Gateway) -> None:
    async with stage(gateway, answers) as [upstream]:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        body = json.dumps(ASK).encode()
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection:"
            b" close\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        writer.write(head + b"%x\r\n%b\r\n0\r\nx-evil: 1\r\n\r\n" % (len(body), body))
        assert (await asyncio.wait_for(reader.read(), HANG_S)).startswith(b"HTTP/1.1 200 ")
        assert b"x-evil" not in b"".join(upstream.calls[0].requests)
        writer.close()


# --- engines that fail ---


async def test_a_refused_connection_is_tried_once_on_another_replica(gateway: Gateway) -> None:
    async with Upstream(answers) as upstream:
        gateway.route(model(refused_url(), upstream.url, refused_url(), served="other"))
        async with http_client(gateway) as client:
            assert (await client.post(CHAT, json=ASK)).status_code == 200
            assert json.loads(upstream.calls[0].body) == {**ASK, "model": "other"}
        await gateway.wait_until_settled()


async def test_the_engine_is_unreachable_when_no_replica_takes_the_connection(
    gateway: Gateway,
) -> None:
    for urls in [refused_url()], [refused_url(), refused_url()]:
        gateway.route(model(*urls))
        async with http_client(gateway) as client:
            response = await client.post(CHAT, json=ASK)
            assert (response.status_code, response.json()["error"]["code"]) == (
                502,
                "engine_unreachable",
            )
            assert response.headers["x-gateway-source"] == "gateway"
        await gateway.wait_until_settled()


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-type: appl",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x00" * 4096,
        b"HTTP/1.1 999 Odd\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 307 Moved\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 500_000,
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_engines_that_die_or_talk_nonsense_before_their_headers_are_an_engine_error(
    gateway: Gateway, garbage: bytes
) -> None:
    """Another one is asked only where the connection closed before an answer: the engine has
    died."""

    async def script(call: Call) -> None:
        await call.send(garbage)
        call.close()

    async with stage(gateway, script, script) as upstreams, http_client(gateway) as client:
        response = await client.post(CHAT, json=ASK)
        assert (response.status_code, response.json()["error"]["code"]) == (502, "engine_error")
        is_dead = not garbage or garbage.endswith(b"content-type: appl")
        assert sum(len(upstream.requests) for upstream in upstreams) == (2 if is_dead else 1)


async def test_a_header_value_no_client_should_see_is_dropped(gateway: Gateway) -> None:
    async def script(call: Call) -> None:
        await call.reply(
            b"{}",
            headers=(
                "content-type: application/json\r\ncache-control: a\tb\r\nretry-after: \xff\r\n"
            ),
        )

    async with stage(gateway, script), http_client(gateway) as client:
        response = await client.post(CHAT, json=ASK)
        assert (response.status_code, response.content) == (200, b"{}")
        assert not {"cache-control", "retry-after"} & set(response.headers)


@pytest.mark.parametrize("value", ["a\x01b", "a\0b", "a\r\n b"])
async def test_an_answer_with_a_header_that_http_forbids_is_refused(
    gateway: Gateway, value: str
) -> None:
    async def script(call: Call) -> None:
        await call.reply(b"{}", headers=f"cache-control: {value}\r\n")

    async with stage(gateway, script), http_client(gateway) as client:
        assert (await client.post(CHAT, json=ASK)).status_code == 502


@pytest.mark.parametrize("framing", ["transfer-encoding: chunked", "content-length: 1000"])
@pytest.mark.parametrize(
    ("sent", "whole"),
    [
        (b"", True),
        (event("a"), True),
        (b"data: 1234567\n\n", True),
        (b"data: x\r\n\r\n", True),
        (event("a") + b'data: {"choi', False),
        (b"data: 12345678\n", False),
        (b"\n", True),
        (b"abc", False),
    ],
)
async def test_the_death_of_an_engine_ends_its_stream_with_an_error_event(
    gateway: Gateway, sent: bytes, whole: bool, framing: str
) -> None:
    async def script(call: Call) -> None:
        await call.send(
            f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{framing}\r\n\r\n".encode()
        )
        for at in range(0, len(sent), 7):
            await (call.chunk if "chunked" in framing else call.send)(sent[at : at + 7])
        call.close()

    async with stage(gateway, script), http_client(gateway) as client:
        response = await client.post(CHAT, json={**ASK, "stream": True})
        assert response.content.startswith(sent)
        rest = response.content.removeprefix(sent)
        start = b"data: " if whole else b"\n\ndata: "
        assert rest.startswith(start)
        assert rest.endswith(b"\n\n")
        assert json.loads(rest.removeprefix(start))["error"]["code"] == "engine_error"
        assert b"[DONE]" not in response.content


async def test_an_answer_that_is_not_passed_on_gives_its_connection_up(gateway: Gateway) -> None:
    async def script(call: Call) -> None:
        await call.start(status="302 Found")
        await call.closed.wait()

    async with stage(gateway, script) as [upstream], http_client(gateway) as client:
        response = await client.post(CHAT, json=ASK)
        assert response.status_code == 502
        assert "302" in response.json()["error"]["message"]
        await asyncio.wait_for(upstream.calls[0].closed.wait(), HANG_S)


@pytest.mark.parametrize("framing", ["content-length: 1000", "transfer-encoding: chunked"])
async def test_an_engine_that_dies_in_a_plain_answer_breaks_the_transfer(
    gateway: Gateway, framing: str
) -> None:
    async def script(call: Call) -> None:
        await call.send(
            f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{framing}\r\n\r\n".encode()
        )
        await call.chunk(b'{"choices":[]}')
        call.close()

    async with stage(gateway, script), http_client(gateway) as client:
        with pytest.raises(
            httpx.RemoteProtocolError, match="without sending complete message body"
        ):
            await client.post(CHAT, json=ASK)


def with_image(url: str) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return {**ASK, "messages": [{"role": "user", "content": [part]}]}


async def test_media_of_inner_hosts_reach_no_engine(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = {"inner.example": "10.0.0.1", "outer.example": "8.8.8.8"}
    monkeypatch.setattr(
        media_hosts, "resolve_addresses", lambda host: [ipaddress.ip_address(inner[host])]
    )
    async with stage(gateway, answers) as [upstream], http_client(gateway) as client:
        for url in (
            "http://169.254.169.254/latest",
            "http://127.0.0.1:8000/metrics",
            "http://[::1]/",
            "http://inner.example/a.png",
            "file:///a.png",
        ):
            response = await client.post(CHAT, json=with_image(url))
            assert response.status_code == 400
            assert "not fetched" in response.json()["error"]["message"]
        assert upstream.calls == []
        for url in ("https://outer.example/a.png", "data:image/png;base64,AAAA"):
            assert (await client.post(CHAT, json=with_image(url))).status_code == 200
        assert len(upstream.requests) == 2


async def test_a_client_that_leaves_while_a_name_is_resolved_is_forgotten(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(media_hosts, "resolve_addresses", lambda _: release.wait() and [])
    async with stage(gateway, answers) as [upstream], http_client(gateway) as client:
        asking = asyncio.create_task(
            client.post(CHAT, json=with_image("https://slow.example/a.png"))
        )
        await until(lambda: any(connection.exchange for connection in gateway.plane.connections))
        # Others are served meanwhile.
        assert (await client.post(CHAT, json=ASK)).status_code == 200
        asking.cancel()
        await until(
            lambda: not any(connection.exchange for connection in gateway.plane.connections)
        )
        release.set()
        assert len(upstream.requests) == 1
