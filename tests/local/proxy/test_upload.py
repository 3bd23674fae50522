"""Requests that cannot be written to the engine that was chosen for them, and those for whose body
there is no room while they wait."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from gateway.proxy.access.auth import ANONYMOUS_KEY, Key, KeyLimits
from gateway.proxy.bodies.body_budget import SMALL_BYTES
from tests.support.dataplane import (
    ASK,
    CHAT,
    Everyone,
    Gateway,
    Hog,
    answers,
    http_client,
    model,
    stage,
    until,
)
from tests.support.upstream import Call

pytestmark = pytest.mark.anyio


async def test_a_body_with_too_deep_nesting_takes_nobodys_place() -> None:
    """Reading the model takes less of the stack than writing the body anew with another model:
    between the two is a body that can be read only."""
    with Gateway() as gateway:
        async with (
            stage(gateway, answers, served="other") as [upstream],
            http_client(gateway) as client,
        ):
            statuses = set()
            for depth in range(600, 1000):
                nested_body = b'{"model": "m", "x": ' + b"[" * depth + b"]" * depth + b"}"
                statuses.add((await client.post(CHAT, content=nested_body)).status_code)
            gateway.catch_up()
            assert statuses == {200, 400}
            assert gateway.routes.total_in_flight == 0
            assert all(b'"other"' in request for request in upstream.requests)


class OneKey(Everyone):
    """One key for every caller, with two requests at once."""

    def authenticate(self, headers: Any, need: str, address: str) -> Key:
        return replace(ANONYMOUS_KEY, name="app", limit=KeyLimits(in_flight=2))


async def test_a_request_for_which_there_is_no_memory_is_not_under_way() -> None:
    """It would have waited for a replica. The limit of its key counted it for ever."""
    release = asyncio.Event()

    async def holds(call: Call) -> None:
        await release.wait()
        await answers(call)

    with Gateway(keys=OneKey()) as gateway:
        budget, hog = gateway.plane.body_budget, Hog()
        async with stage(gateway, holds) as [upstream], http_client(gateway) as client:
            route = model(upstream.url)
            gateway.route(
                replace(
                    route,
                    replicas=tuple(replace(replica, capacity=1) for replica in route.replicas),
                )
            )
            first_task = asyncio.create_task(client.post(CHAT, json=ASK))
            await until(lambda: bool(upstream.requests))
            budget.add(hog, 2 * budget.size + 1)
            body = json.dumps(ASK).encode()
            large = body.ljust(SMALL_BYTES + 1)
            for _ in range(3):
                assert (await client.post(CHAT, content=large)).status_code == 503
            budget.release(hog)
            release.set()
            assert (await first_task).status_code == 200
            assert (await client.post(CHAT, content=large)).status_code == 200
