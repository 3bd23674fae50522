"""Events of a whole gateway, over a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.domain import LaunchSpec
from tests.support.memory_host import World
from tests.support.patience import HANG_S, hang_s
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio

MEMORY = (
    "ValueError: To serve at least one request with the model's max seq len (4096), (4.00 GiB KV"
    " cache is needed, which is larger than the available KV cache memory (1.0 GiB). Based on the"
    " available memory, the estimated maximum model length is 1024."
)


def healthy(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model)


def limited_script(spec: LaunchSpec) -> EngineScript:
    context = next(
        int(item.partition("=")[2]) for item in spec.argv if item.startswith("--max-model-len=")
    )
    if context > 1024:
        return EngineScript(model=spec.model, lines=((0, MEMORY),), serve=False)
    return EngineScript(model=spec.model, max_model_len=context)


async def stream(gateway: Running, **query: Any) -> AsyncIterator[dict[str, Any]]:
    """Events as they come; one of another name has it as `event`."""
    names = {"last_event_id": "last-event-id", "authorization": "authorization"}
    headers = {header: query.pop(name) for name, header in names.items() if name in query}
    async with gateway.client.stream(
        "GET", "/admin/events", params=query, headers=headers
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        event: dict[str, Any] = {}
        async for line in answer.aiter_lines():
            name, _, value = line.partition(": ")
            if not line and "data" in event:
                yield {
                    **json.loads(event["data"]),
                    "event": event.get("event"),
                    "sse_id": int(event["id"]),
                }
            if not line:
                event = {}
            elif name:
                event[name] = value


async def until(events: AsyncIterator[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    event_list: list[dict[str, Any]] = []
    async with asyncio.timeout(hang_s()):
        async for event in events:
            event_list.append(event)
            if event.get("kind") == kind:
                return event_list
    raise AssertionError(f"{kind} did not come: {[event.get('kind') for event in event_list]}")


async def stored_events(gateway: Running, **query: Any) -> list[dict[str, Any]]:
    answer = await gateway.client.get("/admin/events", params={"follow": "false", **query})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["data"])


async def test_the_life_of_a_model_is_reported_with_its_evidence(tmp_path: Path) -> None:
    async with running(tmp_path, limited_script) as gateway:
        listening = stream(gateway, after=0)
        await gateway.add("m", model_folder(tmp_path / "model"))
        events = await until(listening, "engine.ready")
        await gateway.client.delete("/admin/models/m")
        events += await until(listening, "model.removed")
        await listening.aclose()  # type: ignore[attr-defined]
    kinds = [event["kind"] for event in events]
    kinds_without_states = [kind for kind in kinds if kind not in ("engine.phase", "model.state")]
    assert kinds_without_states == [
        "gateway.started",
        "model.added",
        "plan.chosen",
        "engine.started",
        "engine.failed",
        "plan.fallback",
        "engine.started",
        "engine.proven",
        "engine.ready",
        "model.removing",
        "model.removed",
    ]
    assert {"starting", "verifying", "ready", "stopping"} >= {
        event["data"]["state"] for event in events if event["kind"] == "model.state"
    }
    failure_event = next(event for event in events if event["kind"] == "engine.failed")
    assert failure_event["data"]["failure"]["kind"] == "kv_too_small"
    assert "estimated maximum model length is 1024" in failure_event["data"]["failure"]["line"]
    fallback = next(event for event in events if event["kind"] == "plan.fallback")
    assert fallback["data"]["after"] == "kv_too_small"
    assert {"field": "max model len", "former": "4096", "present": "1024"} in fallback["data"][
        "differences"
    ]
    assert fallback["data"]["why"]["max_model_len"]["reason"]
    assert [event["sse_id"] for event in events] == [event["id"] for event in events]
    assert [event["id"] for event in events] == list(
        range(events[0]["id"], events[0]["id"] + len(events))
    )


async def test_a_returning_client_gets_missed_events_over_a_restart(tmp_path: Path) -> None:
    world = World()
    async with running(tmp_path, healthy, world) as gateway:
        listening = stream(gateway, after=0)
        await gateway.add("m", model_folder(tmp_path / "model"))
        events = await until(listening, "plan.chosen")
        await listening.aclose()  # type: ignore[attr-defined]
        await gateway.until("m", "ready")
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.client.delete("/admin/models/m")
        later = await until(stream(gateway, last_event_id=str(events[-1]["id"])), "model.removed")
        everything = await stored_events(gateway)
    assert [event["id"] for event in [*events, *later]] == [event["id"] for event in everything]
    kinds = [
        event["kind"] for event in later if event["kind"] not in ("engine.phase", "model.state")
    ]
    assert kinds == [
        "engine.started",
        "engine.proven",
        "engine.ready",
        "gateway.stopped",
        # The engine that went on is not told anew.
        "gateway.started",
        "model.removing",
        "model.removed",
    ]


async def test_streams_end_with_a_last_event_when_the_gateway_stops(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []

    async def listen(gateway: Running, listening: asyncio.Event) -> None:
        async for event in stream(gateway, after=0):
            events.append(event)
            listening.set()

    # Longer than the test may take: a stream that does not end by itself holds the server up for so
    # long.
    async with asyncio.timeout(hang_s()):
        async with running(tmp_path, healthy, stop_grace_s=10 * HANG_S) as gateway:
            listening = asyncio.Event()
            # The client outlives the gateway.
            client = httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=hang_s())
            task = asyncio.create_task(
                listen(Running(gateway.url, client, gateway.world), listening)
            )
            await listening.wait()
        await task
        await client.aclose()
    assert [event["kind"] for event in events] == ["gateway.started", "gateway.stopped"]


async def test_a_client_that_asks_for_lost_events_hears_that(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        await until(stream(gateway, after=0), "gateway.started")
        newest = (await stored_events(gateway))[-1]["id"]
        for after in (1, newest + 1000):
            events = stream(gateway, after=after)
            async with asyncio.timeout(hang_s()):
                first = await anext(events)
            assert (first["event"], first["newest"], first["sse_id"]) == ("resync", newest, newest)
            await events.aclose()  # type: ignore[attr-defined]


async def test_a_list_and_a_stream_may_be_of_one_model(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        for name in ("a", "b"):
            await gateway.add(name, model_folder(tmp_path / name))
            await gateway.until(name, "ready")
        await until(stream(gateway, model="b", after=0), "engine.ready")
        of_b = await stored_events(gateway, model="b")
        assert {event["model"] for event in of_b} == {"b"}
        assert [event["id"] for event in await stored_events(gateway, model="b", last=2)] == [
            event["id"] for event in of_b[-2:]
        ]
        assert await stored_events(gateway, model="b", after=of_b[0]["id"], last=1) == [of_b[1]]
        listening = stream(gateway, model="b", last=1)
        async with asyncio.timeout(hang_s()):
            assert (await anext(listening))["id"] == of_b[-1]["id"]
        await gateway.client.delete("/admin/models/a")
        await gateway.client.delete("/admin/models/b")
        events = await until(listening, "model.removed")
        assert {event["model"] for event in events} == {"b"}
        await listening.aclose()  # type: ignore[attr-defined]


async def test_events_name_keys_and_never_show_them(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        wish = {"name": "root", "scopes": ["admin", "read"]}
        document = (await gateway.client.post("/admin/keys", json=wish)).json()
        gateway.client.headers["authorization"] = f"Bearer {document['key']}"
        # The stream of a removed key ends, so another key listens.
        wish = {"name": "reader", "scopes": ["admin", "read"]}
        reader = (await gateway.client.post("/admin/keys", json=wish)).json()
        listening = stream(gateway, after=0, authorization=f"Bearer {reader['key']}")
        event = await until(listening, "key.added")
        last = event[-1]
        assert (await gateway.client.delete("/admin/keys/root")).status_code == 200
        event += await until(listening, "key.removed")
        await listening.aclose()  # type: ignore[attr-defined]
        assert last["data"] == {"key": "root", "scopes": ["admin", "read"]}
        assert document["key"] not in json.dumps(event)
