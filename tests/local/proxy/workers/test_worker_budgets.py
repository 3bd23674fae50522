"""Budgets over several workers, and over a kill of the whole gateway."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.key_gateway import answer_with_usage
from tests.support.patience import hang_s
from tests.support.served import Served, serve_models, worker_pids
from tests.support.stored_responses import OWNER, bearer
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

WORKERS = 3
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def engine(call: Call) -> None:
    if call.head[0].startswith(b"GET"):
        await call.reply(b'{"object":"list","data":[{"id":"m","object":"model"}]}')
    else:
        await answer_with_usage(call)


@asynccontextmanager
async def gateway_of_workers(folder: Path, url: str = "") -> AsyncIterator[Served]:
    """url: the address of the engine of a new model m; "": the models of the data folder."""
    models = {"m": [f"{url}/v1"]} if url else {}
    running = serve_models(folder, models, OWNER, FITSERVE_WORKERS=str(WORKERS))
    gateway = await asyncio.to_thread(running.__enter__)
    try:
        yield gateway
    finally:
        await asyncio.to_thread(running.__exit__, None, None, None)


def owner_client(gateway: Served) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=gateway.url, headers=bearer(OWNER), trust_env=False, timeout=hang_s()
    )


async def make_key(client: httpx.AsyncClient, **budget: Any) -> str:
    response = await client.post("/admin/keys", json={"name": "app", "budget": budget})
    assert response.status_code == 201, response.text
    return str(response.json()["key"])


async def used_of(client: httpx.AsyncClient) -> dict[str, float]:
    keys = (await client.get("/admin/keys")).json()["data"]
    (view,) = [key for key in keys if key["name"] == "app"]
    return {row["measure"]: row["used"] for row in view["used"]}


async def ask(gateway: Served, key: str) -> int:
    """The status of an answer over a connection of its own.

    Without certificates, whose reading would keep the engine of this process from its checks.
    """
    async with httpx.AsyncClient(trust_env=False, verify=False, timeout=hang_s()) as client:
        path = f"{gateway.url}/v1/chat/completions"
        return (await client.post(path, json=BODY, headers=bearer(key))).status_code


async def wait_for_routes(gateway: Served) -> None:
    """Wait until each worker has the route of the model: connections go to any of them."""
    answers_in_a_row = 0
    async with asyncio.timeout(hang_s()):
        while answers_in_a_row < 10 * WORKERS:
            is_answered = await ask(gateway, OWNER) == 200
            answers_in_a_row = answers_in_a_row + 1 if is_answered else 0


async def test_workers_admit_exactly_the_requests_of_a_budget(tmp_path: Path) -> None:
    async with (
        Upstream(engine) as upstream,
        gateway_of_workers(tmp_path, upstream.url) as gateway,
        owner_client(gateway) as client,
    ):
        await wait_for_routes(gateway)
        key = await make_key(client, requests_per_day=25)
        statuses = Counter(await asyncio.gather(*(ask(gateway, key) for _ in range(60))))
        assert statuses == {200: 25, 429: 35}
        assert await used_of(client) == {"requests": 25}


async def test_a_kill_of_all_processes_loses_no_answered_request(tmp_path: Path) -> None:
    answer_count = try_count = 0

    async def ask_on(gateway: Served, key: str) -> None:
        nonlocal answer_count, try_count
        while True:
            try_count += 1
            status = await ask(gateway, key)
            answer_count += status == 200

    async with Upstream(engine) as upstream:
        async with gateway_of_workers(tmp_path, upstream.url) as gateway:
            async with owner_client(gateway) as client:
                key = await make_key(client, requests_per_day=10**6, tokens_per_day=10**9)
            callers = [asyncio.create_task(ask_on(gateway, key)) for _ in range(4)]
            async with asyncio.timeout(hang_s()):
                while answer_count < 30:
                    await asyncio.sleep(0.01)
            pids = await asyncio.to_thread(worker_pids, tmp_path / "data")
            for pid in (gateway.process.pid, *pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.gather(*callers, return_exceptions=True)
        async with gateway_of_workers(tmp_path) as gateway, owner_client(gateway) as client:
            usage = await used_of(client)
    assert answer_count <= usage["requests"] <= try_count
    # Requests that were cut off have the estimate of their prompt alone.
    assert 50 * answer_count <= usage["tokens"] + 50 * 4
