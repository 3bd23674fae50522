"""A gateway with two workers, in front of engines that a test runs: limits over all workers count
as in one process."""

from __future__ import annotations

import asyncio
import itertools
import json
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.proxy.shared_memory import SharedMemory
from tests.support.patience import HANG_S, hang_s
from tests.support.served import serve_models
from tests.support.stored_responses import OTHER, OWNER, Engine, bearer, make, uses
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
LISTED = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
# The kernel chooses the worker by the client's port: of twelve connections each has some, but for
# one run in 2,000.
CLIENTS = 12


class Answers:
    """An engine. None of its answers comes before `answer_event` is set."""

    def __init__(self) -> None:
        self.answer_event = asyncio.Event()
        self.answer_event.set()
        self.request_count = 0

    async def __call__(self, call: Call) -> None:
        if call.head[0].startswith(b"GET"):
            await call.reply(LISTED)
            return
        self.request_count += 1
        await self.answer_event.wait()
        await call.reply(
            b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}'
        )


@asynccontextmanager
async def two_workers(
    folder: Path, *engines: Any, **settings: str
) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Clients of a gateway with the model m, the admin key OWNER and the api key OTHER. Each has
    one connection, which it keeps."""
    async with AsyncExitStack() as stack:
        urls = [
            f"{(await stack.enter_async_context(Upstream(engine))).url}/v1" for engine in engines
        ]
        running = serve_models(
            folder, {"m": urls}, OWNER, FITSERVE_API_KEY=OTHER, FITSERVE_WORKERS="2", **settings
        )
        gateway = await asyncio.to_thread(running.__enter__)
        try:
            one_each = httpx.Limits(max_connections=1)
            yield [
                await stack.enter_async_context(
                    httpx.AsyncClient(
                        base_url=gateway.url, timeout=hang_s(), trust_env=False, limits=one_each
                    )
                )
                for _ in range(CLIENTS)
            ]
        finally:
            await asyncio.to_thread(running.__exit__, None, None, None)


async def ask(client: httpx.AsyncClient, key: str) -> httpx.Response:
    return await client.post(CHAT, json=ASK, headers=bearer(key))


async def until(check: Any) -> None:
    """It comes true: reports of workers are half a second old."""
    async with asyncio.timeout(hang_s()):
        while not await check():
            await asyncio.sleep(0.05)


async def metrics(client: httpx.AsyncClient) -> Counter[str]:
    """Counts by name, summed over labels, without the requests of the start."""
    counts: Counter[str] = Counter()
    for line in (await client.get("/metrics", headers=bearer(OWNER))).text.splitlines():
        if not line.startswith("#") and 'endpoint="models"' not in line:
            counts[line.partition("{")[0].partition(" ")[0]] += float(line.rpartition(" ")[2])  # type: ignore[assignment]
    return counts


async def test_every_worker_knows_at_once_the_key_and_replica_of_a_response(
    tmp_path: Path,
) -> None:
    async with two_workers(tmp_path, Engine(), Engine()) as clients:
        for number, client in enumerate(clients):
            id_ = await make(client, OWNER, stream=number % 2 == 0)
            for another in clients[number % 6 :: 6]:
                assert [status for status, _ in await uses(another, OWNER, id_)] == [200] * 5
                assert [status for status, _ in await uses(another, OTHER, id_)] == [404] * 5


async def test_limits_of_a_key_are_those_of_all_workers_together(tmp_path: Path) -> None:
    engine = Answers()
    async with two_workers(tmp_path, engine) as clients:
        grants: tuple[dict[str, Any], ...] = (
            {"name": "requests", "requests_per_minute": 1},
            {"name": "tokens", "tokens_per_minute": 1},
            {"name": "many", "max_in_flight": 5},
        )
        keys = []
        for grant in grants:
            new_answer = await clients[0].post("/admin/keys", json=grant, headers=bearer(OWNER))
            keys.append(new_answer.json()["key"])
        requests, tokens, places = keys
        # All at once. One of a minute's worth of one comes back after a minute, so at the most one,
        # whatever the order.
        statuses = await asyncio.gather(*(ask(client, requests) for client in clients))
        assert Counter(answer.status_code for answer in statuses) == {200: 1, 429: CLIENTS - 1}
        # Tokens are known at the end: then no worker lets in another one (7 were taken of 1, so for
        # six minutes).
        assert (await ask(clients[0], tokens)).status_code == 200
        assert {(await ask(client, tokens)).status_code for client in clients} == {429}
        # None of five ends before all were asked.
        engine.answer_event.clear()
        asking = [asyncio.create_task(ask(client, places)) for client in clients]
        for answer in itertools.islice(asyncio.as_completed(asking), CLIENTS - 5):
            assert (await answer).status_code == 429
        engine.answer_event.set()
        statuses = await asyncio.gather(*asking)
        assert Counter(answer.status_code for answer in statuses) == {200: 5, 429: CLIENTS - 5}
        assert (await ask(clients[0], places)).status_code == 200


async def test_wrong_keys_of_an_address_are_counted_over_all_processes(tmp_path: Path) -> None:
    async with two_workers(tmp_path, Answers()) as clients:
        counter: Counter[int] = Counter()
        for number in range(30):  # the admin API is the control process's
            client = clients[number % CLIENTS]
            headers = bearer(f"a-wrong-key-{number}")
            answer = await (
                client.get("/admin/models", headers=headers)
                if number % 3
                else client.post(CHAT, json=ASK, headers=headers)
            )
            counter[answer.status_code] += 1
        assert counter == {401: 10, 429: 20}
        assert {(await ask(client, OTHER)).status_code for client in clients} == {200}


async def test_a_queue_has_its_places_once(tmp_path: Path) -> None:
    engine = Answers()
    async with two_workers(
        tmp_path, engine, FITSERVE_QUEUE_PER_MODEL="4", FITSERVE_WAITING_COMMENT_S="0"
    ) as clients:
        # No replica is ready, and the model may be waited for: all have to queue.
        body = {"name": "n", "endpoints": ["http://127.0.0.1:9/v1"], "policy": {"wait_s": 3600}}
        assert (
            await clients[0].post("/admin/models", json=body, headers=bearer(OWNER))
        ).status_code == 202
        asking = [
            asyncio.create_task(
                client.post(CHAT, json={**ASK, "model": "n"}, headers=bearer(OTHER))
            )
            for client in clients
        ]
        # Four requests may wait at most.
        for answer in itertools.islice(asyncio.as_completed(asking), CLIENTS - 4):
            assert (await answer).status_code == 503
        for task in asking:
            task.cancel()


async def test_requests_in_flight_are_those_of_all_workers_and_each_can_be_ended(
    tmp_path: Path,
) -> None:
    engine = Answers()
    async with two_workers(tmp_path, engine) as clients:
        engine.answer_event.clear()
        asking = {
            f"r{number}": asyncio.create_task(
                client.post(CHAT, json=ASK, headers=bearer(OTHER) | {"x-request-id": f"r{number}"})
            )
            for number, client in enumerate(clients)
        }
        # The clients' own connections are taken: one more asks the control process.
        async with httpx.AsyncClient(
            base_url=clients[0].base_url, timeout=hang_s(), trust_env=False, headers=bearer(OWNER)
        ) as owner:

            async def rows() -> list[dict[str, Any]]:
                return list((await owner.get("/admin/requests")).json()["data"])

            request_rows: list[dict[str, Any]] = []

            async def are_all_there() -> bool:
                # A worker that answers late is left out of a listing.
                request_rows[:] = await rows()
                return len(request_rows) == len(clients)

            await until(are_all_there)
            assert {row["id"] for row in request_rows} == asking.keys()
            assert [row["began_at"] for row in request_rows] == sorted(
                row["began_at"] for row in request_rows
            )
            for id_, row in asking.items():
                assert (await owner.delete(f"/admin/requests/{id_}")).json() == {"cancelled": 1}
                assert (await asyncio.wait_for(row, hang_s())).status_code == 403

            async def are_all_gone() -> bool:
                return await rows() == []

            await until(are_all_gone)
            assert (await owner.delete("/admin/requests/r0")).status_code == 404


async def test_metrics_are_those_of_all_workers(tmp_path: Path) -> None:
    engine = Answers()
    async with two_workers(tmp_path, engine) as clients:
        for client in clients * 2:
            assert (await ask(client, OTHER)).status_code == 200
        assert (
            await clients[0].post(CHAT, json={"model": "x"}, headers=bearer(OTHER))
        ).status_code == 404

        async def are_all_counted() -> bool:
            values_of_worker = await metrics(clients[0])
            return (
                values_of_worker["fitserve_requests_total"],
                values_of_worker["fitserve_connections"],
            ) == (
                2 * CLIENTS + 1,
                CLIENTS,
            )

        await until(are_all_counted)
        metric_values = await metrics(clients[0])
        assert metric_values["fitserve_tokens_total"] == 2 * CLIENTS * 7
        assert (
            metric_values["fitserve_request_duration_seconds_count"]
            == metric_values["fitserve_first_byte_seconds_count"]
            == 2 * CLIENTS
        )
        engine.answer_event.clear()
        asking = [asyncio.create_task(ask(client, OTHER)) for client in clients[1:]]

        async def all_in_flight() -> bool:
            return (await metrics(clients[0]))["fitserve_requests_in_flight"] == CLIENTS - 1

        await until(all_in_flight)
        engine.answer_event.set()
        await asyncio.gather(*asking)

        async def none_in_flight() -> bool:
            return not (await metrics(clients[0]))["fitserve_requests_in_flight"]

        await until(none_in_flight)


# --- the memory of several processes ---

ADMIT = """
import sys
from gateway.errors import RateLimited
from gateway.keys import SCOPES
from gateway.proxy.access.auth import Key, KeyLimits
from gateway.proxy.shared_memory import SharedMemory
from gateway.proxy.workers.shared_limits import SharedRateLimiter
limiter = SharedRateLimiter(SharedMemory(int(sys.argv[1])), int(sys.argv[2]))
key, count = Key("k", bytes(32), SCOPES, None, KeyLimits(100)), 0
limiter.rows = {key.digest: 0}
print(flush=True)
sys.stdin.readline()
for _ in range(300):
    try:
        limiter.admit(key, "openai", 0.0)
        count += 1
    except RateLimited:
        pass
print(count)
"""
HOLD = """
import sys
from gateway.proxy.shared_memory import SharedMemory
SharedMemory(int(sys.argv[1])).lock(3).__enter__()
print(flush=True)
sys.stdin.readline()
"""


def process(code: str, memory: SharedMemory, *arguments: str) -> subprocess.Popen[str]:
    """It runs, and has said that it is ready."""
    command = [sys.executable, "-c", code, str(memory.descriptor), *arguments]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[memory.descriptor],
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_workers_that_admit_at_the_same_time_admit_no_more_than_one_could() -> None:
    memory = SharedMemory()
    running = [process(ADMIT, memory, str(index)) for index in range(3)]
    for client_process in running:
        assert client_process.stdin is not None
        client_process.stdin.write("\n")
        client_process.stdin.flush()
    assert sum(int(process.communicate(timeout=hang_s())[0]) for process in running) == 100


def test_a_lock_whose_holder_is_stopped_keeps_nobody_for_ever() -> None:
    memory = SharedMemory()
    with process(HOLD, memory) as holder:
        with memory.lock(3):
            assert holder.poll() is None
        holder.kill()


async def test_events_come_through_a_worker_and_end_with_the_gateway(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    three = asyncio.Event()

    async def listen(url: httpx.URL) -> None:
        # A client of its own, which outlives the gateway.
        async with (
            httpx.AsyncClient(
                base_url=url, trust_env=False, timeout=hang_s(), headers=bearer(OWNER)
            ) as client,
            client.stream("GET", "/admin/events", params={"after": 0}) as answer,
        ):
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    events.append(json.loads(line.removeprefix("data: ")))
                    if len(events) >= 3:
                        three.set()

    # The time that the test may take: a stream that does not end by itself holds the gateway up for
    # so long.
    async with two_workers(tmp_path, Answers(), FITSERVE_STOP_GRACE_S=str(2 * HANG_S)) as clients:
        listening = asyncio.create_task(listen(clients[0].base_url))
        await asyncio.wait_for(three.wait(), hang_s())
        for client in clients:
            await client.aclose()
    await asyncio.wait_for(listening, hang_s())
    assert [event["kind"] for event in events if event["kind"] != "model.state"] == [
        "gateway.started",
        "model.added",
        "endpoint.reached",
        "gateway.stopped",
    ]


async def test_usage_is_of_all_workers_and_of_their_last_moment_too(tmp_path: Path) -> None:
    async with two_workers(tmp_path, Answers()) as clients:
        for key in (OWNER, OTHER):
            assert all([(await ask(client, key)).is_success for client in clients])
    # Nobody has looked at it before the end.
    with sqlite3.connect(tmp_path / "data" / "fitserve.db") as db:
        query = (
            "SELECT key, sum(requests), sum(prompt_tokens), sum(completion_tokens) FROM usage GROUP"
            " BY key ORDER BY key"
        )
        assert db.execute(query).fetchall() == [
            ("admin", CLIENTS, 3 * CLIENTS, 4 * CLIENTS),
            ("api", CLIENTS, 3 * CLIENTS, 4 * CLIENTS),
        ]
