"""A gateway with an admin key, and keys that it makes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gateway.domain import LaunchSpec
from tests.support.running import Running, running
from tests.support.scripted_engine import EngineScript
from tests.support.upstream import Call, Upstream

ADMIN = "the-admin-key-of-this-test"


USAGE = {"prompt_tokens": 30, "completion_tokens": 20, "total_tokens": 50}


async def answer_with_usage(call: Call) -> None:
    """Answers with a usage block."""
    await call.reply(json.dumps({"id": "c1", "choices": [], "usage": USAGE}).encode())


def unused_script(spec: LaunchSpec) -> EngineScript:
    raise AssertionError(spec.model)


@asynccontextmanager
async def gateway(
    tmp_path: Path, script: Any = answer_with_usage, **settings: Any
) -> AsyncIterator[tuple[Running, Upstream]]:
    """A gateway with an admin key, and the models `a` and `b` of one engine."""
    async with (
        Upstream(script) as upstream,
        running(tmp_path, unused_script, admin_key=ADMIN, **settings) as server,
    ):
        server.client.headers["authorization"] = f"Bearer {ADMIN}"
        upstream_models = [{"id": name, "object": "model"} for name in ("a",)]
        await serve_models(server, upstream, upstream_models)
        yield server, upstream


async def serve_models(server: Running, upstream: Upstream, listed: Any) -> None:
    async def script(call: Call) -> None:
        if b"GET" in call.requests[-1][:4]:
            await call.reply(json.dumps({"object": "list", "data": listed}).encode())
        else:
            await original(call)

    original, upstream._script = upstream._script, script
    for name in ("a", "b"):
        response = await server.client.post(
            "/admin/models", json={"name": name, "endpoint": f"{upstream.url}/v1"}
        )
        assert response.status_code == 202, response.text
    for name in ("a", "b"):
        await server.until(name, "ready")


async def make(server: Running, name: str, **fields: Any) -> str:
    response = await server.client.post("/admin/keys", json={"name": name, **fields})
    assert response.status_code == 201, response.text
    return str(response.json()["key"])
