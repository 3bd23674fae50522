"""Spans of requests over sockets: the record of each end, and the context that the engine gets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from gateway.proxy.tracing.request_span import RequestSpan
from gateway.proxy.tracing.span_buffer import SpanBuffer
from gateway.proxy.tracing.traced_metrics import TracedMetrics
from tests.support.dataplane import (
    ASK,
    CHAT,
    DONE,
    Gateway,
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
from tests.support.patience import HANG_S
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
USAGE = {
    "prompt_tokens": 30,
    "completion_tokens": 20,
    "total_tokens": 50,
    "prompt_tokens_details": {"cached_tokens": 16},
}


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with Gateway(meter=TracedMetrics(1.0, SpanBuffer())) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_spans(gateway: Gateway) -> None:
    taken_spans(gateway)


def taken_spans(gateway: Gateway) -> tuple[RequestSpan, ...]:
    gateway.catch_up()
    meter = gateway.plane.meter
    assert isinstance(meter, TracedMetrics)
    return meter.drain_spans()


async def span_of(gateway: Gateway) -> RequestSpan:
    await gateway.wait_until_settled()
    [span] = taken_spans(gateway)
    return span


async def counts(call: Call) -> None:
    await call.reply(json.dumps({"choices": [], "usage": USAGE}).encode())


async def test_a_span_has_the_facts_of_an_answered_request(gateway: Gateway) -> None:
    before_ns = time.time_ns()
    async with stage(gateway, counts), http_client(gateway) as client:
        response = await client.post(CHAT, json=ASK, headers={"x-request-id": "mine"})
        assert response.status_code == 200
    span = await span_of(gateway)
    assert span._replace(
        trace_id=b"", span_id=b"", started_ns=0, first_byte_ns=0, ended_ns=0, attempts=()
    ) == RequestSpan(
        b"", b"", b"", "", "mine", span.key, "chat", "POST", CHAT, "m", 0, 0, 0, 0, (), 200,
        "answered", "", False, 30, 20, 16,
    )  # fmt: skip
    assert len(span.trace_id) == 16
    assert len(span.span_id) == 8
    [(sent_ns, replica, _)] = span.attempts
    assert replica == "m-0"
    # The loop's clock goes by milliseconds.
    near_ns = 5_000_000
    times = [before_ns - near_ns, span.started_ns, sent_ns, span.first_byte_ns, span.ended_ns]
    assert times == sorted(times)


async def test_no_word_of_a_request_or_its_answer_is_in_a_span(gateway: Gateway) -> None:
    async def reply_with_canary(call: Call) -> None:
        await call.reply(b'{"choices":[{"message":{"content":"canary-of-an-answer"}}]}')

    messages = [{"role": "user", "content": "canary-of-a-prompt"}]
    body = {**ASK, "messages": messages, "user": "canary"}
    async with stage(gateway, reply_with_canary), http_client(gateway) as client:
        headers = {"authorization": "Bearer canary-of-a-key", "cookie": "canary=1"}
        assert "canary" in (await client.post(CHAT, json=body, headers=headers)).text
    assert "canary" not in repr(await span_of(gateway))


# --- context ---


async def test_a_request_with_a_context_keeps_the_address_of_its_client(gateway: Gateway) -> None:
    addresses: list[str] = []

    async def script(call: Call) -> None:
        in_flight = await gateway.plane.requests()
        addresses.extend(request.address for request in in_flight.data)
        await answers(call)

    headers = {"traceparent": TRACEPARENT}
    async with stage(gateway, script), http_client(gateway) as client:
        await client.post(CHAT, json=ASK, headers=headers)
    assert addresses == ["127.0.0.1"]


async def test_the_engine_gets_the_span_as_its_parent(gateway: Gateway) -> None:
    headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1", "accept": "text/x-test"}
    async with stage(gateway, answers) as [upstream], http_client(gateway) as client:
        await client.post(CHAT, json=ASK, headers=headers)
        engine_headers = upstream.calls[0].headers
        head = upstream.requests[0].lower()
    span = await span_of(gateway)
    assert (span.trace_id.hex(), span.parent_id.hex()) == (TRACE, PARENT)
    assert engine_headers["traceparent"] == f"00-{TRACE}-{span.span_id.hex()}-01"
    assert engine_headers["tracestate"] == "vendor=1"
    assert engine_headers["accept"] == "text/x-test"
    assert head.count(b"\r\ntraceparent:") == head.count(b"\r\ntracestate:") == 1


async def test_a_parent_that_does_not_sample_passes_without_a_span(gateway: Gateway) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    async with stage(gateway, answers) as [upstream], http_client(gateway) as client:
        await client.post(CHAT, json=ASK, headers=headers)
        parent = upstream.calls[0].headers["traceparent"]
    assert parent.startswith(f"00-{TRACE}-")
    assert PARENT not in parent
    assert parent.endswith("-00")
    assert taken_spans(gateway) == ()


@pytest.mark.parametrize("parents", [["nonsense"], [TRACEPARENT, TRACEPARENT]])
async def test_an_invalid_parent_never_reaches_the_engine(
    gateway: Gateway, parents: list[str]
) -> None:
    headers = [*(("traceparent", parent) for parent in parents), ("tracestate", "vendor=1")]
    async with stage(gateway, answers) as [upstream], http_client(gateway) as client:
        await client.post(CHAT, json=ASK, headers=headers)
        engine_headers = upstream.calls[0].headers
    span = await span_of(gateway)
    assert span.parent_id == b""
    assert span.trace_id.hex() != TRACE
    assert engine_headers["traceparent"] == f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01"
    assert "tracestate" not in engine_headers


async def test_requests_with_a_repeated_head_have_a_context_each(gateway: Gateway) -> None:
    async with stage(gateway, answers) as [upstream]:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        for _ in range(3):
            writer.write(raw_request(json.dumps(ASK).encode()))
            await asyncio.wait_for(reader.readuntil(b'"stop"}]}'), HANG_S)
        writer.close()
        await until(lambda: len(upstream.requests) == 3)
        heads = [request.partition(b"\r\n\r\n")[0].lower() for request in upstream.requests]
    await gateway.wait_until_settled()
    spans = taken_spans(gateway)
    assert len({span.trace_id for span in spans}) == 3
    parents = [head.partition(b"traceparent: ")[2][:55].decode() for head in heads]
    assert parents == [f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01" for span in spans]
    assert all(head.count(b"traceparent:") == 1 for head in heads)


# --- ends ---


async def test_a_stream_has_its_first_token_and_usage(gateway: Gateway) -> None:
    go_event = asyncio.Event()

    async def streams(call: Call) -> None:
        await call.start()
        await go_event.wait()
        await call.chunk(event("first"))
        usage = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"
        await call.chunk(usage + DONE)
        await call.end()

    body = {**ASK, "stream": True}
    async with (
        stage(gateway, streams),
        http_client(gateway) as client,
        client.stream("POST", CHAT, json=body) as stream,
    ):
        silent_ns = time.time_ns()
        await asyncio.sleep(0.02)
        go_event.set()
        await stream.aread()
    span = await span_of(gateway)
    assert span.is_stream
    assert span.first_byte_ns > silent_ns
    assert (span.prompt_tokens, span.completion_tokens, span.cached_tokens) == (30, 20, 16)
    assert (span.status, span.outcome, span.error) == (200, "answered", "")


async def test_a_client_that_leaves_ends_its_span(gateway: Gateway) -> None:
    async with stage(gateway, streams_for_ever):
        async with (
            http_client(gateway) as client,
            client.stream("POST", CHAT, json={**ASK, "stream": True}) as stream,
        ):
            await anext(stream.aiter_raw())
        span = await span_of(gateway)
    assert (span.status, span.outcome) == (200, "left")
    assert span.first_byte_ns


async def test_an_operator_that_cancels_ends_a_span(gateway: Gateway) -> None:
    async with stage(gateway, streams_for_ever), http_client(gateway) as client:
        headers = {"x-request-id": "gone"}
        async with client.stream(
            "POST", CHAT, json={**ASK, "stream": True}, headers=headers
        ) as stream:
            pieces = stream.aiter_raw()
            await anext(pieces)
            cancelling = asyncio.run_coroutine_threadsafe(
                gateway.plane.cancel("gone"), gateway._loop
            )
            assert await asyncio.wrap_future(cancelling) == 1
            assert [piece async for piece in pieces]
        span = await span_of(gateway)
    assert (span.request_id, span.outcome) == ("gone", "cancelled")


async def test_a_request_for_an_unknown_model_is_a_span_without_a_replica(
    gateway: Gateway,
) -> None:
    async with stage(gateway, answers), http_client(gateway) as client:
        response = await client.post(CHAT, json={**ASK, "model": "absent-canary"})
        code = response.json()["error"]["code"]
    span = await span_of(gateway)
    assert (span.status, span.outcome, span.error) == (404, "refused", code)
    assert span.attempts == ()
    assert "absent-canary" not in repr(span)
    assert 0 < span.started_ns <= span.ended_ns


async def test_an_error_of_the_engine_keeps_its_status(gateway: Gateway) -> None:
    async def refuses(call: Call) -> None:
        await call.reply(b'{"error":{"message":"no"}}', "400 Bad Request")

    async with stage(gateway, refuses), http_client(gateway) as client:
        assert (await client.post(CHAT, json=ASK)).status_code == 400
    span = await span_of(gateway)
    assert (span.status, span.outcome, span.error) == (400, "answered", "")
    assert span.prompt_tokens is None


async def test_an_engine_that_dies_in_a_stream_breaks_the_span(gateway: Gateway) -> None:
    async def dies(call: Call) -> None:
        await call.start()
        await call.chunk(event("first"))
        call.close()

    async with stage(gateway, dies), http_client(gateway) as client:
        body = {**ASK, "stream": True}
        assert "engine_error" in (await client.post(CHAT, json=body)).text
    span = await span_of(gateway)
    assert (span.status, span.outcome) == (200, "broken")


async def test_a_retry_is_one_span_with_two_sends_and_one_context(gateway: Gateway) -> None:
    async with Upstream(answers) as upstream, http_client(gateway) as client:
        gateway.route(model(refused_url(), upstream.url))
        # One of them is chosen first; the balance of an idle gateway may choose either.
        for _ in range(20):
            assert (await client.post(CHAT, json=ASK)).status_code == 200
            spans = taken_spans(gateway)
            if len(spans[0].attempts) == 2:
                break
        [span] = spans
        assert [replica for _, replica, _ in span.attempts] == ["m-0", "m-1"]
        parent = upstream.calls[-1].headers["traceparent"]
        assert parent == f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01"
        assert upstream.requests[-1].lower().count(b"\r\ntraceparent:") == 1
        await gateway.wait_until_settled()


async def test_a_wait_for_a_replica_is_part_of_the_span(gateway: Gateway) -> None:
    go_event = asyncio.Event()

    async def waits(call: Call) -> None:
        await go_event.wait()
        await answers(call)

    async with Upstream(waits) as upstream, http_client(gateway) as client:
        route = model(upstream.url)
        gateway.route(replace(route, replicas=(replace(route.replicas[0], capacity=1),)))
        first = asyncio.create_task(client.post(CHAT, json=ASK))
        await until(lambda: len(upstream.requests) == 1)
        second = asyncio.create_task(client.post(CHAT, json=ASK))
        await until(lambda: gateway.routes.waiting("m") == 1)
        await asyncio.sleep(0.02)
        go_event.set()
        await asyncio.gather(first, second)
        await gateway.wait_until_settled()
    direct, queued = taken_spans(gateway)
    assert direct.queued_ns == 0
    assert queued.queued_ns > 0
    [(sent_ns, _, _)] = queued.attempts
    assert queued.queued_ns <= sent_ns - queued.started_ns + 5_000_000


async def test_a_client_that_leaves_the_queue_has_waited(gateway: Gateway) -> None:
    async with Upstream(never_answers) as upstream, http_client(gateway) as client:
        route = model(upstream.url)
        gateway.route(replace(route, replicas=(replace(route.replicas[0], capacity=1),)))
        first = asyncio.create_task(client.post(CHAT, json=ASK))
        await until(lambda: len(upstream.requests) == 1)
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(raw_request(json.dumps(ASK).encode()))
        await until(lambda: gateway.routes.waiting("m") == 1)
        await asyncio.sleep(0.02)
        writer.transport.abort()
        await until(lambda: gateway.routes.waiting("m") == 0)
        [span] = taken_spans(gateway)
        assert (span.outcome, span.status, span.attempts) == ("left", 0, ())
        assert span.queued_ns > 0
        first.cancel()
        await gateway.wait_until_settled()


async def test_a_list_of_models_has_no_span(gateway: Gateway) -> None:
    async with stage(gateway, answers), http_client(gateway) as client:
        assert (await client.get("/v1/models")).status_code == 200
    assert taken_spans(gateway) == ()
