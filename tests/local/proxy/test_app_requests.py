"""Requests of real apps to a gateway (tests/apps, recorded from the versions that docs/apps.md
names; long texts cut, keys and ids taken out), sent again: each request is answered, reaches the
engine with all of its body, and is refused in words that the app shows.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.key_gateway import ADMIN, make, unused_script
from tests.support.paths import ROOT
from tests.support.running import Running, running
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

APPS = sorted((ROOT / "tests/apps").glob("*.json"))
# Paths of which the gateway itself answers.
OWN = ("/", "/v1/models")
EVENT = b'data: {"choices": [], "answered": true}\n\ndata: [DONE]\n\n'
WHOLE = b'{"choices": [], "answered": true}'


def record_events(file: Path) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = json.loads(file.read_text())["requests"]
    assert requests
    return requests


async def answer_as_engines(call: Call) -> None:
    if call.head[0].startswith(b"GET /v1/models"):
        await call.reply(b'{"object": "list", "data": [{"id": "served", "object": "model"}]}')
    elif call.body and json.loads(call.body).get("stream"):
        await call.start()
        await call.chunk(EVENT)
        await call.end()
    else:
        await call.reply(WHOLE if call.body else b"")


@asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[tuple[Running, list[bytes], str]]:
    """A gateway with keys and the model `m`; also the requests at its engine, and the key of an
    app."""
    requests: list[bytes] = []

    async def script(call: Call) -> None:
        if call.body:
            requests.append(call.requests[-1])
        await answer_as_engines(call)

    async with (
        Upstream(script) as upstream,
        running(folder, unused_script, admin_key=ADMIN) as server,
    ):
        server.client.headers["authorization"] = f"Bearer {ADMIN}"
        response = await server.client.post(
            "/admin/models", json={"name": "m", "endpoint": f"{upstream.url}/v1"}
        )
        assert response.status_code == 202, response.text
        await server.until("m", "ready")
        key = await make(server, "app")
        del server.client.headers["authorization"]
        yield server, requests, key


async def send(gateway: Running, request: dict[str, Any], key: str) -> httpx.Response:
    headers = {name: value.replace("KEY", key) for name, value in request["headers"].items()}
    body = json.dumps(request["body"]).encode() if "body" in request else None
    return await gateway.client.request(
        request["method"], request["target"], headers=headers, content=body
    )


@pytest.mark.parametrize("file", APPS, ids=lambda file: file.stem)
async def test_each_request_of_an_app_is_answered(file: Path, tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, requests, key):
        for request in record_events(file):
            requests.clear()
            answer = await send(server, request, key)
            assert answer.status_code == 200, (request["target"], answer.text)
            path = request["target"].partition("?")[0]
            if path in OWN:
                assert answer.headers["x-gateway-source" if path == "/v1/models" else "etag"]
                continue
            [reached] = requests
            head, _, body = reached.partition(b"\r\n\r\n")
            # The engine's own path, without the client's query, headers and key.
            assert head.startswith(f"POST {path} HTTP/1.1\r\n".encode())
            assert key.encode() not in reached
            assert json.loads(body) == {**request["body"], "model": "served"}
            assert answer.content == (EVENT if request["body"].get("stream") else WHOLE)


@pytest.mark.parametrize("file", APPS, ids=lambda file: file.stem)
async def test_an_app_with_a_wrong_key_or_model_is_told_so_once(file: Path, tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, requests, key):
        # One for each target: after ten wrong keys from one address more of them are answered
        # otherwise.
        for target, request in {
            request["target"]: request for request in record_events(file) if "body" in request
        }.items():
            for answer, words in (
                (await send(server, request, "wrong-key"), "The key is not valid at this gateway."),
                (
                    await send(
                        server, {**request, "body": {**request["body"], "model": "other"}}, key
                    ),
                    "'other' does not exist here.",
                ),
            ):
                assert answer.status_code in (401, 404)
                assert words in answer.json()["error"]["message"]
                assert ("type" in answer.json()) == target.startswith("/v1/messages"), (
                    "in the shape of the API that was asked"
                )
                # Neither SDK asks again: that would be minutes of nothing to see.
                assert answer.headers["x-should-retry"] == "false"
        assert not requests


@pytest.mark.parametrize("path", ["/", "/health", "/healthz", "/readyz"])
async def test_a_head_is_answered_as_the_get_of_its_path(path: str, tmp_path: Path) -> None:
    """Claude Code looks so whether somebody is there, and so do monitors."""
    async with gateway(tmp_path) as (server, _, _):
        head, get = await server.client.head(path), await server.client.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == get.headers["content-length"]
        refusal = await server.client.head("/admin/models")
        assert (refusal.status_code, refusal.content) == (401, b"")
