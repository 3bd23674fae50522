"""The answer to a client where an engine's answer cannot be passed on as it is, or breaks off
before any of it was passed on."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.proxy.api.endpoints import find
from gateway.proxy.client_answer import BufferedAnswer
from gateway.proxy.exchange import Exchange
from tests.support.dataplane import ASK, CHAT, Gateway, http_client, model, raw_request
from tests.support.patience import HANG_S, wait_until
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio


CHAT_ENDPOINT = find(CHAT, b"", "POST")
MESSAGES_ENDPOINT = find("/v1/messages", b"", "POST")


def test_an_answer_that_is_no_event_stream_becomes_one_event() -> None:
    buffered_answer = BufferedAnswer()
    buffered_answer.writelines([b'{"error":\n', b'{"message": "x"}}'])
    assert buffered_answer.event(CHAT_ENDPOINT, 200) == b'data: {"error":{"message":"x"}}\n\n'
    error = b'{"type":"error","error":{"type":"invalid_request_error","message":"x"}}'
    assert buffered_answer.event(MESSAGES_ENDPOINT, 400) == b"event: error\ndata: %b\n\n" % error
    for data in (b"<html>\n\n</html>", b"[" * 200_000):
        odd = BufferedAnswer()
        odd.write(data)
        odd.write(b"more")
        value = json.loads(odd.event(MESSAGES_ENDPOINT, 200).removeprefix(b"event: error\ndata: "))
        assert value["error"]["message"].startswith("The engine's answer is not an event stream")


ENGINES_WORDS = (
    (
        b'{"error":{"message":"max_tokens: field required","type":"Bad'
        b' Request","param":"max_tokens","code":400}}'
    ),
    (
        b'{"object":"error","message":"max_tokens: field'
        b' required","type":"BadRequestError","param":null,"code":400}'
    ),
    b'{"detail":"max_tokens: field required"}',
    b"max_tokens: field required",
    (
        b'{"type":"error","error":{"type":"invalid_request_error","message":"max_tokens: field'
        b' required"}}'
    ),
)


@pytest.mark.parametrize("body", ENGINES_WORDS)
@pytest.mark.parametrize("chunked", [False, True])
async def test_an_engines_error_has_the_shape_of_anthropic_where_that_was_asked(
    body: bytes, chunked: bool
) -> None:
    async def engine(call: Call) -> None:
        if chunked:
            await call.start("text/plain", "400 Bad Request")
            await call.chunk(body)
            await call.end()
        else:
            await call.reply(body, status="400 Bad Request")

    with Gateway() as gateway:
        async with Upstream(engine) as upstream, http_client(gateway) as client:
            gateway.route(model(upstream.url))
            # The second answer of a connection has a known head.
            for _ in range(2):
                answer = await client.post("/v1/messages", json=ASK)
                assert (answer.status_code, answer.headers["x-gateway-source"]) == (400, "engine")
                assert answer.headers["content-type"] == "application/json"
                error = {"type": "invalid_request_error", "message": "max_tokens: field required"}
                assert answer.json() == {"type": "error", "error": error}
                error = (await client.post(CHAT, json=ASK)).json()["error"]
                assert error["message"] == "max_tokens: field required"
                assert (error["type"], error["code"]) == ("invalid_request_error", None)


async def test_a_good_answer_of_an_engine_is_passed_on_as_it_is() -> None:
    async def engine(call: Call) -> None:
        await call.reply(b'{"type": "message"}')

    with Gateway() as gateway:
        async with Upstream(engine) as upstream, http_client(gateway) as client:
            gateway.route(model(upstream.url))
            assert (await client.post("/v1/messages", json=ASK)).content == b'{"type": "message"}'


async def test_a_client_of_anthropic_hears_that_its_connection_closes_after_an_error() -> None:
    async def engine(call: Call) -> None:
        await call.reply(b"no", status="400 Bad Request")

    with Gateway() as gateway:
        async with Upstream(engine) as upstream:
            gateway.route(model(upstream.url))
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            request = raw_request(json.dumps(ASK).encode(), "/v1/messages")
            writer.write(request.replace(b"host: x", b"host: x\r\nconnection: close"))
            head, _, body = (await asyncio.wait_for(reader.read(), HANG_S)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ")
            assert b"connection: close" in head.split(b"\r\n")
            assert json.loads(body)["type"] == "error"
            writer.close()


async def test_an_error_for_anthropic_that_breaks_off_is_answered_all_the_same() -> None:
    """Nothing of it was passed on, because its shape is another one."""

    async def engine(call: Call) -> None:
        await call.send(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 1000\r\n\r\n" + b"x" * 10)
        call.close()

    with Gateway() as gateway:
        async with Upstream(engine) as upstream, http_client(gateway) as client:
            gateway.route(model(upstream.url))
            answer = await client.post("/v1/messages", json=ASK)
            assert (answer.status_code, answer.headers["x-gateway-source"]) == (502, "gateway")
            assert answer.json()["error"]["message"].startswith(
                "The engine broke off before it answered."
            )
            await gateway.wait_until_settled()


async def test_a_request_that_is_ended_while_its_engine_may_be_dying_is_answered() -> None:
    """The head of a 500 is held back until the body tells whether the engine dies."""
    event = asyncio.Event()

    async def engine(call: Call) -> None:
        await call.send(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 1000\r\n\r\n")
        event.set()
        await call.closed.wait()

    with Gateway() as gateway:
        async with Upstream(engine) as upstream, http_client(gateway) as client:
            gateway.route(model(upstream.url))
            asking = asyncio.create_task(
                client.post(CHAT, json=ASK, headers={"x-request-id": "mine"})
            )
            await asyncio.wait_for(event.wait(), HANG_S)
            [front] = gateway.plane.connections

            async def has_ended() -> bool:
                exchange = front.exchange
                return (
                    isinstance(exchange, Exchange)
                    and exchange.answer.status == 500
                    and await gateway.plane.cancel("mine") == 1
                )

            def look() -> bool:
                return asyncio.run_coroutine_threadsafe(has_ended(), gateway._loop).result(HANG_S)

            await wait_until("the request is ended", look, 0.005)
            answer = await asking
            assert answer.json()["error"]["message"].startswith(
                "The operator of this gateway ended this request."
            )
            await gateway.wait_until_settled()
