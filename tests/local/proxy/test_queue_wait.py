"""Waiting for a model, with a whole gateway and its loop, and with the official SDKs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from gateway.domain import LaunchSpec
from tests.support.dataplane import Gateway, event, model, raw_request, until
from tests.support.memory_host import MemoryHost
from tests.support.patience import HANG_S
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

PATIENT = {"policy": {"wait_s": 3600}}
HI: list[Any] = [{"role": "user", "content": "hi"}]


def chat(gateway: Running, **fields: Any) -> asyncio.Task[httpx.Response]:
    body = {"model": "m", "messages": HI, "max_tokens": 5, **fields}
    return asyncio.create_task(gateway.client.post("/v1/chat/completions", json=body))


# --- the whole gateway ---


async def test_requests_wait_for_a_model_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_event = asyncio.Event()

    async def prepare(*_: object) -> None:
        await wait_event.wait()

    monkeypatch.setattr(MemoryHost, "prepare", prepare)
    async with running(
        tmp_path, lambda spec: EngineScript(model=spec.model), waiting_comment_s=0.2
    ) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"), **PATIENT)
        plain = chat(gateway)
        body = {"model": "m", "messages": HI, "max_tokens": 5, "stream": True}
        async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as stream:
            assert stream.status_code == 200
            text = ""
            async for piece in stream.aiter_text():
                text += piece
                wait_event.set()
        assert text.startswith(": waiting\n\n")
        assert text.endswith("data: [DONE]\n\n")
        assert (await plain).status_code == 200
        assert (await gateway.show("m"))["wish"]["policy"]["wait_s"] == 3600


async def test_requests_outlast_an_engine_that_is_killed_and_started_again(tmp_path: Path) -> None:
    """Some come while the engine is dead and nobody knows it yet: they find its port closed, and
    wait as well."""
    async with running(
        tmp_path, lambda spec: EngineScript(model=spec.model), backoff_s=0.5, tick_s=0.3
    ) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"), **PATIENT)
        await gateway.until("m", "ready")
        (name,) = gateway.world.engines
        gateway.world.engines[name].kill()
        tasks = []
        for _ in range(20):
            await asyncio.sleep(0.05)
            tasks.append(chat(gateway))
        assert [(await task).status_code for task in tasks] == [200] * 20
        assert [attempt["state"] for attempt in (await gateway.show("m"))["attempts"]] == [
            "failed",
            "ready",
        ]


async def test_a_model_that_fails_for_good_is_not_waited_for(tmp_path: Path) -> None:
    def killed_script(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, exit_code=137)

    async with running(tmp_path, killed_script) as gateway:
        await gateway.add(
            "m", model_folder(tmp_path / "model"), policy={"wait_s": 3600, "max_attempts": 2}
        )
        answer = await chat(gateway)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_ready")
        assert (await gateway.show("m"))["state"] == "quarantined"


async def test_an_engine_gets_as_many_requests_as_it_runs_and_a_quarter(tmp_path: Path) -> None:
    hold = tmp_path / "hold"

    def seats(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, hold=hold)

    async with running(tmp_path, seats, queue_per_model=3) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"), args={"max-num-seqs": 4})
        view = await gateway.until("m", "ready")
        assert view["plan"]["max_num_seqs"]["value"] == 4
        hold.touch()
        chats = [chat(gateway) for _ in range(12)]
        await until(lambda: sum(chat_task.done() for chat_task in chats) == 4)
        hold.unlink()
        statuses = sorted(answer.status_code for answer in await asyncio.gather(*chats))
        assert statuses == [200] * (5 + 3) + [429] * 4


# --- the official clients ---


@pytest.fixture
async def soon() -> AsyncIterator[Gateway]:
    """A gateway whose model starts, and is waited for; its clock stands."""
    with Gateway(waiting_comment_s=10, stands_still=True) as gateway:
        gateway.route(replace(model(), state="starting", wait_s=60))
        yield gateway
        await gateway.wait_until_settled()


async def wait_for_comments(gateway: Gateway) -> None:
    await until(lambda: gateway.routes.waiting("m") == 1)
    gateway.later(11)
    gateway.later(11)


async def test_the_openai_sdk_reads_past_the_comments_and_raises_an_error_that_comes_after(
    soon: Gateway,
) -> None:
    async def script(call: Call) -> None:
        await call.start()
        await call.chunk(event("a") + event("b") + b"data: [DONE]\n\n")
        await call.end()

    async def refuses(call: Call) -> None:
        await call.reply(
            b'{"error": {"message": "too long", "type": "BadRequestError", "code": 400}}',
            "400 Bad Request",
        )

    async def read() -> list[str | None]:
        stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
        return [chunk.choices[0].delta.content async for chunk in stream]

    async with openai.AsyncOpenAI(base_url=f"{soon.url}/v1", api_key="x", max_retries=0) as client:
        reading = asyncio.create_task(read())
        await wait_for_comments(soon)
        async with Upstream(script) as upstream:
            soon.route(model(upstream.url))
            assert await reading == ["a", "b"]
        soon.route(replace(model(), state="starting", wait_s=60))
        reading = asyncio.create_task(read())
        await wait_for_comments(soon)
        async with Upstream(refuses) as upstream:
            soon.route(model(upstream.url))
            with pytest.raises(openai.APIError, match="too long"):
                await reading


@pytest.mark.parametrize("headers", ["content-type: text/event-stream\r\n", ""])
async def test_a_promised_stream_ends_where_the_engine_has_no_content(
    soon: Gateway, headers: str
) -> None:
    async def script(call: Call) -> None:
        await call.send(f"HTTP/1.1 204 No Content\r\n{headers}\r\n".encode())

    reader, writer = await asyncio.open_connection("127.0.0.1", soon.port)
    writer.write(raw_request(b'{"model":"m","stream":true,"messages":[]}'))
    await wait_for_comments(soon)
    async with Upstream(script) as upstream:
        soon.route(model(upstream.url))
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), HANG_S)
        assert b"The engine's answer is not an event stream." in answer
        writer.close()


async def test_the_anthropic_sdk_raises_an_error_that_comes_after_a_comment(soon: Gateway) -> None:
    async def read() -> None:
        async for _ in await client.messages.create(
            model="m", max_tokens=5, messages=HI, stream=True
        ):
            pass

    async with anthropic.AsyncAnthropic(base_url=soon.url, api_key="x", max_retries=0) as client:
        reading = asyncio.create_task(read())
        await wait_for_comments(soon)
        soon.route(replace(model(), state="quarantined", detail="it failed 5 times"))
        with pytest.raises(anthropic.APIError, match="it failed 5 times"):
            await reading
