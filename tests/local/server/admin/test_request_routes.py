"""Requests in flight of a whole gateway, over a socket and by the command line."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.domain import LaunchSpec
from tests.support.commands import fitserve
from tests.support.dataplane import CHAT, never_answers, refused_url, streams_for_ever
from tests.support.patience import HANG_S, hang_s
from tests.support.running import Running, running
from tests.support.scripted_engine import EngineScript
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

ADMIN = "request-secret-1"
# The tasks of requests under way.
Requests = list[asyncio.Task[httpx.Response]]


def unused_script(_: LaunchSpec) -> EngineScript:
    raise AssertionError("no engine is started")


async def works(call: Call) -> None:
    if call.head[0].startswith(b"GET"):
        await call.reply(b'{"object": "list", "data": [{"id": "m", "object": "model"}]}')
    else:
        await (streams_for_ever if b'"stream"' in call.body else never_answers)(call)


async def list_requests(server: Running, count: int) -> list[dict[str, Any]]:
    """The requests in flight, once there are so many."""
    async with asyncio.timeout(hang_s()):
        while len(rows := (await server.client.get("/admin/requests")).json()["data"]) != count:
            await asyncio.sleep(0.02)
    return list(rows)


@asynccontextmanager
async def two_requests(folder: Path) -> AsyncIterator[tuple[Running, dict[str, Any], Requests]]:
    """A gateway with a plain and a streamed request in flight, headers with the key of each scope,
    and the requests."""
    async with (
        running(folder, unused_script, admin_key=ADMIN) as gateway,
        Upstream(works) as upstream,
    ):
        gateway.client.headers["authorization"] = f"Bearer {ADMIN}"
        headers = {}
        for scope in ("inference", "read"):
            key = await gateway.client.post("/admin/keys", json={"name": scope, "scopes": [scope]})
            headers[scope] = {"authorization": f"Bearer {key.json()['key']}"}
        wish = {"name": "m", "endpoints": [f"{upstream.url}/v1"]}
        await gateway.client.post("/admin/models", json=wish)
        await gateway.until("m", "ready")
        assert (await gateway.client.get("/admin/requests")).json() == {
            "data": [],
            "more": 0,
            "waiting": [],
        }
        body = {"model": "m", "messages": [{"role": "user", "content": "a secret"}]}
        tasks: Requests = []
        for id_, fields in (("first", {}), ("second/2?", {"stream": True})):
            request = gateway.client.post(
                CHAT, json=body | fields, headers=headers["inference"] | {"x-request-id": id_}
            )
            tasks.append(asyncio.create_task(request))
            await list_requests(gateway, len(tasks))
        yield gateway, headers, tasks
        for task in tasks:
            task.cancel()


async def test_requests_are_listed_by_api_and_command_line(tmp_path: Path) -> None:
    async with two_requests(tmp_path) as (gateway, headers, _):
        async with asyncio.timeout(hang_s()):
            while (rows := await list_requests(gateway, 2))[1]["phase"] != "answering":
                await asyncio.sleep(0.02)
        assert [(row["id"], row["model"], row["key"], row["address"]) for row in rows] == [
            ("first", "m", "inference", "127.0.0.1"),
            ("second/2?", "m", "inference", "127.0.0.1"),
        ]
        assert rows[0]["phase"] == "waiting for the first token"
        assert rows[1]["sent_bytes"] > 0
        assert 0 <= time.time() - rows[1]["began_at"] < HANG_S
        assert "secret" not in json.dumps(rows)
        result = await asyncio.to_thread(
            fitserve, "ps", "--requests", FITSERVE_URL=gateway.url, FITSERVE_KEY=ADMIN
        )
        lines = result.stdout.splitlines()
        assert [line.split()[0] for line in lines] == ["MODEL", "m", "m"], result.stderr
        assert lines[2].endswith("second/2?")
        seen_by_reader = await gateway.client.get("/admin/requests", headers=headers["read"])
        assert len(seen_by_reader.json()["data"]) == 2


async def test_waiting_requests_are_listed_by_class(tmp_path: Path) -> None:
    async with running(tmp_path, unused_script) as gateway:
        wish = {"name": "cold", "endpoints": [f"{refused_url()}/v1"], "policy": {"wait_s": 600}}
        response = await gateway.client.post("/admin/models", json=wish)
        assert response.status_code == 202, response.text
        ask = {"model": "cold", "messages": [{"role": "user", "content": "hi"}]}
        tasks = [
            asyncio.create_task(
                gateway.client.post(
                    "/v1/chat/completions", json=ask, headers={"x-fitserve-priority": class_}
                )
            )
            for class_ in ("batch", "normal", "batch")
        ]
        rows: list[dict[str, Any]] = []
        async with asyncio.timeout(hang_s()):
            while sum(row["requests"] for row in rows) < len(tasks):
                await asyncio.sleep(0.02)
                rows = (await gateway.client.get("/admin/requests")).json()["waiting"]
        assert [(row["model"], row["priority"], row["requests"]) for row in rows] == [
            ("cold", 0, 1),
            ("cold", 100, 2),
        ]
        result = await asyncio.to_thread(fitserve, "ps", "--requests", FITSERVE_URL=gateway.url)
        lines = result.stdout.partition("CLASS")[2].splitlines()[1:]
        assert [line.split()[:3] for line in lines] == [
            ["cold", "normal", "1"],
            ["cold", "batch", "2"],
        ], result.stderr
        for task in tasks:
            task.cancel()


async def test_an_admin_alone_ends_requests(tmp_path: Path) -> None:
    async with two_requests(tmp_path) as (gateway, headers, tasks):
        for method, path, scope in (
            ("DELETE", "/first", "read"),
            ("GET", "", "inference"),
            ("DELETE", "/first", "inference"),
        ):
            refusal = await gateway.client.request(
                method, f"/admin/requests{path}", headers=headers[scope]
            )
            assert refusal.status_code == 403
        async with asyncio.timeout(hang_s()):
            while (await list_requests(gateway, 2))[1]["phase"] != "answering":
                await asyncio.sleep(0.02)
        for path, count in (("second%2F2%3F", 1), ("first", 0)):
            response = await gateway.client.delete(f"/admin/requests/{path}")
            assert (response.status_code, response.json()) == (200, {"cancelled": 1})
            await list_requests(gateway, count)
        answers = await asyncio.wait_for(asyncio.gather(*tasks), hang_s())
        assert [answer.status_code for answer in answers] == [403, 200]
        assert all('"cancelled"' in answer.text for answer in answers)
        reply = await gateway.client.delete("/admin/requests/first")
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")
        # An engine that was let go of has not failed.
        metrics = (await gateway.client.get("/metrics")).text
        assert 'outcome="cancelled",status="2xx"} 1' in metrics
        assert 'fitserve_refusals_total{code="cancelled"} 1' in metrics
        assert "fitserve_upstream_errors_total{" not in metrics
