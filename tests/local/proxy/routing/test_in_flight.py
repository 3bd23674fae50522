"""Requests in flight of a data plane on a real socket: the view of each phase, and the end of a
cancelled one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

import httpx
import pytest

from gateway.proxy.routing.in_flight import RequestInFlight
from tests.support.dataplane import (
    ASK,
    CHAT,
    Gateway,
    answers,
    event,
    http_client,
    model,
    never_answers,
    refused_url,
    stage,
    streams_for_ever,
    until,
)
from tests.support.patience import HANG_S, hang_s
from tests.support.upstream import Call

pytestmark = pytest.mark.anyio

STREAM = {**ASK, "stream": True}


def run_in_loop(gateway: Gateway, work: Coroutine[Any, Any, Any]) -> Any:
    """In the gateway's loop."""
    return asyncio.run_coroutine_threadsafe(work, gateway._loop).result(HANG_S)


async def wait_for_request(gateway: Gateway, phase: str) -> RequestInFlight:
    """The one request, once it is so far."""
    async with asyncio.timeout(hang_s()):
        while True:
            rows: list[RequestInFlight] = run_in_loop(gateway, gateway.plane.requests()).data
            if [row.phase for row in rows] == [phase]:
                return rows[0]
            await asyncio.sleep(0.005)


async def headers_only(call: Call) -> None:
    await call.start()
    await call.closed.wait()


@pytest.mark.parametrize(
    ("script", "phase", "sent"),
    [
        (never_answers, "waiting for the first token", 0),
        (headers_only, "waiting for the first token", 0),
        (streams_for_ever, "answering", len(event("first"))),
    ],
)
@pytest.mark.parametrize("body", [ASK, STREAM])
async def test_a_request_in_an_engine_is_shown_and_ends_for_client_and_engine(
    script: Callable[[Call], Awaitable[None]], phase: str, sent: int, body: dict[str, Any]
) -> None:
    with Gateway() as gateway:
        async with stage(gateway, script) as [upstream], http_client(gateway) as client:
            asking = asyncio.create_task(
                client.post(CHAT, json=body, headers={"x-request-id": "mine/1"})
            )
            await until(lambda: any(call.requests for call in upstream.calls))
            row = await wait_for_request(gateway, phase)
            assert (row.id, row.model, row.endpoint, row.key, row.address) == (
                "mine/1",
                "m",
                "chat",
                "",
                "127.0.0.1",
            )
            assert (row.replica, row.sent_bytes, row.received_bytes) == (
                "m-0",
                sent,
                len(upstream.calls[0].body),
            )
            assert run_in_loop(gateway, gateway.plane.cancel("another")) == 0
            assert run_in_loop(gateway, gateway.plane.cancel("mine/1")) == 1
            answer = await asyncio.wait_for(asking, HANG_S)
            await asyncio.wait_for(upstream.calls[0].closed.wait(), HANG_S)
            assert run_in_loop(gateway, gateway.plane.requests()).data == ()
            # The head of a stream may be on its way when its request is cancelled.
            if answer.status_code == 403:
                assert script is not streams_for_ever
                error = answer.json()["error"]
            else:
                assert "[DONE]" not in answer.text
                error = json.loads(answer.text.rpartition("data: ")[2])["error"]
            assert error["code"] == "cancelled"
            assert "ended this request" in error["message"]


async def test_a_waiting_request_is_shown_and_leaves_the_queue() -> None:
    with Gateway() as gateway:
        async with stage(gateway, never_answers), http_client(gateway) as client:
            full = model(refused_url())
            for route, phase in (
                (replace(model(), state="starting", wait_s=HANG_S), "waiting for the model"),
                (
                    replace(full, replicas=(replace(full.replicas[0], capacity=0),)),
                    "waiting for a place",
                ),
            ):
                gateway.route(route)
                asking = asyncio.create_task(client.post(CHAT, json=ASK))
                row = await wait_for_request(gateway, phase)
                assert (row.replica, row.first_byte_s, row.sent_bytes) == (None, None, 0)
                assert run_in_loop(gateway, gateway.plane.cancel(row.id)) == 1
                assert (await asyncio.wait_for(asking, HANG_S)).status_code == 403
                assert gateway.routes.waiting("m") == 0


async def test_a_connection_serves_on_after_its_request_was_cancelled() -> None:
    async def script(call: Call) -> None:
        await (never_answers if b"slow" in call.body else answers)(call)

    with Gateway() as gateway:
        limits = httpx.Limits(max_connections=1)
        async with (
            stage(gateway, script),
            httpx.AsyncClient(
                base_url=gateway.url, timeout=HANG_S, trust_env=False, limits=limits
            ) as client,
        ):
            asking = asyncio.create_task(client.post(CHAT, json={**ASK, "user": "slow"}))
            row = await wait_for_request(gateway, "waiting for the first token")
            run_in_loop(gateway, gateway.plane.cancel(row.id))
            assert (await asyncio.wait_for(asking, HANG_S)).status_code == 403
            [before] = gateway.plane.connections
            assert (await client.post(CHAT, json=ASK)).status_code == 200
            assert gateway.plane.connections == {before}
