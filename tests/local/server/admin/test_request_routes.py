"""Requests in flight of a whole gateway, over a socket and by the command line."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import LaunchSpec
from tests.local.cli.test_main import fitserve
from tests.support.dataplane import CHAT, never_answers, streams_for_ever
from tests.support.patience import HANG_S, hang_s
from tests.support.running import Running, running
from tests.support.scripted_engine import EngineScript
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

ADMIN = "request-secret-1"


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


async def test_requests_are_listed_and_an_admin_alone_ends_them(
    tmp_path: Path,
) -> None:
    async with (
        running(tmp_path, unused_script, admin_key=ADMIN) as gateway,
        Upstream(works) as upstream,
    ):
        gateway.client.headers["authorization"] = f"Bearer {ADMIN}"
        keys = {}
        for name, scope in (("app", "inference"), ("eye", "read")):
            new_answer = await gateway.client.post(
                "/admin/keys", json={"name": name, "scopes": [scope]}
            )
            keys[name] = {"authorization": f"Bearer {new_answer.json()['key']}"}
        await gateway.client.post(
            "/admin/models", json={"name": "m", "endpoints": [f"{upstream.url}/v1"]}
        )
        await gateway.until("m", "ready")
        assert (await gateway.client.get("/admin/requests")).json() == {"data": [], "more": 0}
        body = {"model": "m", "messages": [{"role": "user", "content": "a secret"}]}
        asking = []
        for id_, more in (("first", {}), ("second/2?", {"stream": True})):
            headers = keys["app"] | {"x-request-id": id_}
            asking.append(
                asyncio.create_task(gateway.client.post(CHAT, json=body | more, headers=headers))
            )
            await list_requests(gateway, len(asking))
        async with asyncio.timeout(hang_s()):
            while (rows := await list_requests(gateway, 2))[1]["phase"] != "answering":
                await asyncio.sleep(0.02)
        assert [(row["id"], row["model"], row["key"], row["address"]) for row in rows] == [
            ("first", "m", "app", "127.0.0.1"),
            ("second/2?", "m", "app", "127.0.0.1"),
        ]
        assert rows[0]["phase"] == "waiting for the first token"
        assert rows[1]["sent_bytes"] > 0
        assert 0 <= time.time() - rows[1]["began_at"] < HANG_S
        assert "secret" not in json.dumps(rows)
        result = await asyncio.to_thread(
            fitserve, "ps", "--requests", FITSERVE_URL=gateway.url, FITSERVE_KEY=ADMIN
        )
        assert [line.split()[0] for line in result.stdout.splitlines()] == ["MODEL", "m", "m"], (
            result.stderr
        )
        assert result.stdout.splitlines()[2].endswith("second/2?")
        # Who may read sees them, and ends none; who may ask does neither.
        assert (
            len((await gateway.client.get("/admin/requests", headers=keys["eye"])).json()["data"])
            == 2
        )
        for method, path, key in (
            ("DELETE", "/first", "eye"),
            ("GET", "", "app"),
            ("DELETE", "/first", "app"),
        ):
            assert (
                await gateway.client.request(method, f"/admin/requests{path}", headers=keys[key])
            ).status_code == 403
        for path, count in (("second%2F2%3F", 1), ("first", 0)):
            response = await gateway.client.delete(f"/admin/requests/{path}")
            assert (response.status_code, response.json()) == (200, {"cancelled": 1})
            await list_requests(gateway, count)
        answers = await asyncio.wait_for(asyncio.gather(*asking), hang_s())
        assert [answer.status_code for answer in answers] == [403, 200]
        assert all('"cancelled"' in answer.text for answer in answers)
        reply = await gateway.client.delete("/admin/requests/first")
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")
        # An engine that was let go of has not failed.
        metrics = (await gateway.client.get("/metrics")).text
        assert 'outcome="cancelled",status="2xx"} 1' in metrics
        assert 'fitserve_refusals_total{code="cancelled"} 1' in metrics
        assert "fitserve_upstream_errors_total{" not in metrics
